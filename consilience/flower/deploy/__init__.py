"""From a simulation to several organisations: a Flower app around a config, its local deployment on one machine, `verify`."""
