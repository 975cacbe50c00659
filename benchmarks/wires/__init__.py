"""A training step between nodes whose link is slow."""
