"""State of one unit: its flat parameters, gradients, initial values and life cycle.

In: layouts and shard specs (``layout/``), memory spaces, initial values. Out: ``Unit``, with one ``FlatParameter`` per
dtype and trainability, each with its ``FlatGradient``. Nothing here starts a collective: ``parameters/``,
``gradients/`` and ``step/`` do, and move these objects through their states.

Read first: ``flat_parameter.py`` (buffers of a flat parameter, and their names), ``flat_gradient.py`` (where a gradient
accumulates), ``life_cycle.py`` (the allowed transitions).
"""
