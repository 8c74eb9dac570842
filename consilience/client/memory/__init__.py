"""Client memory that lasts between rounds."""
