"""All-gather (unshard), prefetch and release (reshard) parameters; read and write them unsharded.

In: units with sharded flat parameters, calls from hooks before and after a unit's forward and backward, and parameters
updated by the optimizer. Out: unsharded parameters while a unit computes, and full tensors between steps.

R1 (``all_gather.py``) gathers a unit before it computes; ``prefetch.py`` predicts the next one. R4
(``all_gather_updated.py``) gathers updated shards and overlaps with the next forward. ``user_writes.py`` copies
in-place writes of the program to the shards.

Read first: ``all_gather.py``, ``all_gather_updated.py``, ``full_parameters.py``.
"""
