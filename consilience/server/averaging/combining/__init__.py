"""How weighted replies become one model."""
