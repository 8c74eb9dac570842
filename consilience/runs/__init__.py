"""What a run leaves on disk, and how it survives: folder, lock, logs, checkpoints, identity."""
