"""Implement collectives: over shared memory, process groups (gloo, nccl, hccl), axes of groups, and for one rank."""
rank."""
