"""Sequence parallelism: shard sequences over ranks, with an all-to-all around attention.

In: unsharded batches and a mesh with a ``sequence`` axis. Out: slices [batch, seq / ranks, ...] of the batch, an
attention that sees all positions and some of the heads, and a loss over all tokens.

Read ``slices.py`` (``slice``, ``attention``, ``token_loss``) first, then ``transformers_models.py`` (``sequence``),
which prepares a causal transformers model. The all-to-all is ``functions.all_to_all_dims``.
"""
