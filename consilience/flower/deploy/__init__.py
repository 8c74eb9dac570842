"""From a simulation to several organisations: a Flower app around a config, its rehearsal on one machine, `verify`."""
