"""Traced steps, rewritten to work in place, with fused operations and matrix products."""
