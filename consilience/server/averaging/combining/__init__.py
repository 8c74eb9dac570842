"""Combining rules: weighted replies -> one model."""
