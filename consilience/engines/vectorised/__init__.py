"""One process, one device: the engine, its programs and its lanes."""
