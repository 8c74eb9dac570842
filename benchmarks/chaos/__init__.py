"""Faults drawn from a seed against runs on this machine, and what must hold whatever happens."""
