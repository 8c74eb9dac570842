"""Traced steps, rewritten so that they overwrite, join and multiply instead of allocating."""
