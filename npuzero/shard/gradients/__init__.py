"""Reduce-scatter gradients (R2, R3), agree across ranks before a step, and compute gradient norms.

In: gradients as autograd finishes them (``step/autograd_hooks.py``), and the calls and rules of this rank's program.
Out: a READY gradient, summed over the ranks, per flat parameter; a vote that raises the same error on all ranks if they
differ; norms and counts of non-finite elements.

Read first: ``reduce_scatter.py`` (the reductions and their order), ``vote_rules.py`` (the vote), ``norms.py``.
"""
