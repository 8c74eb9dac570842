"""Layers that compute the same for one client and for a batch of clients: exact layers, keyed randomness, adapters."""
