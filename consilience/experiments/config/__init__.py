"""Settings: the schema of config files, the catalogue of names, and the checks."""
