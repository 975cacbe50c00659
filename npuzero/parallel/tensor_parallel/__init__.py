"""Tensor parallelism: divide Linears and embeddings over neighbouring ranks by a plan.

In: an unsharded model, a mesh with a ``tensor`` axis, a mode and a plan (module name patterns to words). Out: the same
model with forward hooks that call collectives, and with cuts and relations on its parameters, which ``zero`` reads.

Read ``plan_words.py`` (the words), ``divide.py`` (the division as data) and ``collectives_around.py`` (the hooks)
first. ``api.py`` has the public functions; ``attention_heads.py`` checks and divides numbers of heads.
"""
