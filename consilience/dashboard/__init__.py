"""Runs as they go on, in a browser: reads records, changes nothing."""
