"""What a run stores on disk: folder, lock, logs, checkpoints, identity."""
