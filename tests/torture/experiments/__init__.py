"""The experiments, one per module: `SHARE`, its part of a budget, and `run`."""
