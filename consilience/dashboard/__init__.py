"""Runs as they go on, in a browser; changes nothing unless runs may be controlled."""
