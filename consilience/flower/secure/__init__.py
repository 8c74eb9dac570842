"""Secure sums over Flower's SecAgg+ (experimental)."""
