"""Experiments: configs, runs in run folders, records, checkpoints, resuming."""
