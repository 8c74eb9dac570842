"""Readers, one file format per module: files to numpy arrays, or an error that names the file and its defect."""
