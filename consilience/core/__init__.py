"""Core interfaces: trees of tensors, the four parts of an algorithm, the task, and the training loop."""
