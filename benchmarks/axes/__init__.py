"""Benchmarks of steps with ranks that share a batch: tensor, sequence and pipeline ranks, against torch's.

A contender builds its training from the Llama of ``llama.py`` (``contenders.py``; ``pipes.py`` for pipelines).
``work.py`` runs one rank, ``beside.py`` starts, checks and times all sides, ``schedule_picture.py`` draws a step.
"""
