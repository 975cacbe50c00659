"""Workers behind ZeroOptimizer: fused rules and torch optimizers over shards."""
