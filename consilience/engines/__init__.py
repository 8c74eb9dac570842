"""Engines: how clients are executed."""
