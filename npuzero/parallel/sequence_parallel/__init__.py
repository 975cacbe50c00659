"""Sequence parallelism: sequences sharded over ranks, all-to-all around attention."""
