"""Ledgers: server state besides the model."""
