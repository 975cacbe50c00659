"""Benchmarks against peers in their own environments: DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed.

``environments.py`` creates the environments, ``contenders.py`` the peers' training steps; ``kernels.py`` compares
DeepSpeed's kernels, ``nvme.py`` optimizer states on a disk (contenders in ``offloaded.py``).
"""
