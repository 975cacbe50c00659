"""The reference of every op in plain torch: slow and obvious, and shares no code with the kernels.

In: arguments that the ops have checked. Out: the same bits as the kernels. Read ``_flat.py`` (masters and moments
around an update's formula), ``flat_adam.py`` (a formula) and ``cast.py`` (rounding and random draws) first.
"""
