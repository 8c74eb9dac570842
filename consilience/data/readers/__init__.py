"""One file format per module: bytes on disk become numpy arrays, or an error that names the file and its defect."""
