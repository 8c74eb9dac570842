"""What is learned: a module with its kind of task, the built-in kinds with their losses and metrics."""
