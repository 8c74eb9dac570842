"""Modules that mean the same for one client and for many: exact layers, keyed randomness, adapters."""
