"""Backends of ZeroOptimizer: fused rules and torch optimizers, over shards and over plain parameters.

In: the reduced gradients of an engine, or ``parameter.grad``. Out: updated masters, parameters and optimizer states.
Read ``base`` (the interface), ``sharded_parameters`` (fused rules over shards) and ``torch_optimizer`` first.
"""
