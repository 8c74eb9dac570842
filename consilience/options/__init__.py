"""Options by name: read and checked alike whether they come from Python, a file or the command line."""
