"""Benchmarks of the planner, and the published figures that it is compared with.

``published.py`` reads tables of papers and predicts their rows, ``against_papers.py`` compares them,
``against_steps.py`` compares measured steps; ``formulas.py`` and ``efficiency.py`` are the papers' arithmetic.
"""
