"""Update rules of the fused optimizers: ranges, coefficients, moments and step counts of a launch.

In: parameter groups and step counts. Out: the segments and the coefficient table that a kernel launch takes. Read
``rule`` (the interface of a rule), ``segments`` and ``moments`` first.
"""
