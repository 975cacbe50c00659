"""Benchmarks of a training step: npuzero's presets against compute only.

``workload.py`` defines model and data, ``contenders.py`` builds the training, ``work.py`` runs one rank, ``compare.py``
starts, checks and times all contenders, ``memory.py`` measures a rank's memory.
"""
