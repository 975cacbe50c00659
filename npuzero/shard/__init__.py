"""The ZeRO engine: units, their flat parameters, and the four rules of the placement table.

In: a model, a plan per unit, ranks and settings. Out: an :class:`~npuzero.shard.engine.Engine`, which unshards and
reshards units around forward and backward (R1), reduces gradients (R2, R3) and gathers updated parameters (R4).

Folders, lowest first: ``modules/`` (PyTorch modules and tensors), ``layout/`` (units, flat layouts, shard specs),
``state/`` (flat parameters and gradients), ``offload/``, ``parameters/`` (R1, R4), ``gradients/`` (R2, R3), ``step/``.

Read first: ``engine.py`` (how the parts fit together), ``build.py`` (from a model to units),
``step/autograd_hooks.py`` (the order of events in a step).
"""
