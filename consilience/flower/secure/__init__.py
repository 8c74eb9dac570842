"""Secure sums: Flower's SecAgg+ with masks of our own generator (experimental)."""
