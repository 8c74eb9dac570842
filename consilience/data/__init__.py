"""Data sets from anywhere, and the ways to spread them over clients."""
