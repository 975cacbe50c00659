"""Data types of a plan: placements, precisions, mesh sizes, relations, cuts, and the moves of a step.

In: the axes, memories and dtypes that a user chooses. Out: validated values that the engine and the predictions read.
Read placement.py, precision.py and mesh_shape.py first.
"""
