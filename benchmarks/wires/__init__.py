"""Benchmarks of a training step between nodes with a slow link."""
