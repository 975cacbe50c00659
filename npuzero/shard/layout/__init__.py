"""Divide a model into units and flat parameters, and describe how each is sharded.

In: an ``nn.Module``, a plan (or one per unit), and a mesh. Out: unit specs, the slots of each flat, the shard spec of
each of its parts, and communicators that count traffic.

``axis_relations.py`` and ``mesh_axes.py`` keep on parameters how they relate to mesh axes; ``tensor_slices.py`` keeps
their tensor-parallel parts. ``tiled_linear.py`` splits large Linears into units. No module here runs a step.

Read first: ``find_units.py``, ``flat_layout.py``, ``shard_specs.py``.
"""
