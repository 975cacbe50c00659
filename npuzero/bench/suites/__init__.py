"""Benchmark suites: ops, collectives, disks and the cluster."""
