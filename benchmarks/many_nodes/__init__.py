"""Many nodes played by one process against a real SuperLink."""
