"""Layout of a checkpoint: boxes of tensors, metadata, saved parts."""
