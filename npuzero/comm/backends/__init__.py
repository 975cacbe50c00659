"""Backends of collectives: process groups, shared memory, hierarchical, one rank."""
