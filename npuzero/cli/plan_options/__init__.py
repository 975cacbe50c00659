"""Options of ``npuzero plan`` by topic: parallel axes, pipelines, thin wires, offloading, and advice for a cluster.

Each file adds its options to the parser, checks them, and returns plans, table columns or text for ``plan.py``. Read
first: ``advise.py``, ``tiers.py``, ``axes.py``.
"""
