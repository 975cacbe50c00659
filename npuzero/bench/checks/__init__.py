"""Correctness checks of an installation: findings on setup, ops, collectives and training, for ``npuzero check``.

Read first: ``check_ops.py`` (comparison with references), ``op_cases.py`` (the cases), ``check_training.py``.
"""
