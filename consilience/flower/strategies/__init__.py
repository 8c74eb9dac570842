"""Our algorithms as strategies and client functions for users of Flower."""
