"""Benchmarks of the ops on a GPU."""
