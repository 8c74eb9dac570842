"""Our algorithms as Flower strategies, and client functions for them."""
