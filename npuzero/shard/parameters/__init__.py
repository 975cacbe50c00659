"""All-gather, prefetch and free parameters; read and write them unsharded."""
