"""Benchmarks of the planner, and the published figures that it is compared with."""
