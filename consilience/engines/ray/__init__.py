"""Clients pinned to the workers of a Ray cluster."""
