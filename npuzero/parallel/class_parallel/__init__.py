"""Class parallelism: a softmax over classes that are sharded."""
