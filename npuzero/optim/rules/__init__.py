"""Update rules of the fused optimizers, and their states."""
