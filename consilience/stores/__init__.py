"""Storage of per-client rows between rounds: on the device, in host memory or in a file."""
