"""Options by name: read and checked in the same way from Python, a file or the command line."""
