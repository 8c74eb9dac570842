"""Settings: what a config file may say, where its names come from, and how it is checked."""
