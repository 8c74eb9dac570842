"""The figures, one kind to a file: each gives pictures, or nothing where a run has no data for it."""
