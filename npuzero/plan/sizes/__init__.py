"""Sizes of flat parameters in each memory, and the units of a model as a schedule tracks them.

In: a plan, a mesh and the length of each flat parameter. Out: shard lengths, buffers, collectives, offload chunks and
NVMe extents, to the byte as in the engine. Read flat_sizes.py, memory_tiers.py and unit_states.py first.
"""
