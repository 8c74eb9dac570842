"""Tasks: a module with its kind of task, and the built-in kinds with their losses and metrics."""
