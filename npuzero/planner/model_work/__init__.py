"""Work of a model: FLOPs, bytes and activations of its units, and how mesh axes and pipeline stages divide them.

In: a ModelShape with modules on meta. Out: a ModelWorkload per micro-batch, the traffic of layers along tensor and
sequence ranks (axes.py), and exact reports for pipeline stages (stages.py).

Read units.py, meter.py and axes.py first.
"""
