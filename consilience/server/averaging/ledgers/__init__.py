"""What the server keeps beside the model."""
