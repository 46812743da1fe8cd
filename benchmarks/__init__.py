"""Measures and checks the program. Not in the wheel: run from a clone, as `python -m
benchmarks.versus`."""
