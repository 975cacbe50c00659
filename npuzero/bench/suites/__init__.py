"""Benchmark suites: each builds benchmarks of ops, collectives or disks and yields their results.

``cluster.py`` turns probes of a machine into a Cluster for the planner. Read first: ``ops.py``, ``comm.py``,
``cluster.py``.
"""
