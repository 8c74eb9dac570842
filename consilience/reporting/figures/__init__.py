"""The figures, one kind per file; each is empty if a run has no data for it."""
