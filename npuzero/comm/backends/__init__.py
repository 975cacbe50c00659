"""Implement collectives: over shared memory, process groups (gloo, nccl, hccl), hierarchical, and for one rank."""
