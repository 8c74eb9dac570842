"""How much each reply counts."""
