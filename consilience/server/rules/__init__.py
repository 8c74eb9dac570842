"""Server rules other than plain averaging."""
