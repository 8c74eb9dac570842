"""Secure aggregation: Flower's SecAgg+ with our own mask generator (experimental)."""
