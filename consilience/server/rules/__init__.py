"""Servers that do something else than averaging the replies of a round."""
