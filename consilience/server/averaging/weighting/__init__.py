"""Aggregation weights of the replies."""
