"""The workload of benchmarks/flower_simulation.py as a Flower app."""
