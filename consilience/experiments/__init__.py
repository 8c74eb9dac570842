"""From a config file to a run folder and back: configs, runs, records, checkpoints, resuming."""
