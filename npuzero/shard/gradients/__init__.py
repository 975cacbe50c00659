"""Reduce-scatter gradients, agree on them across ranks, and measure their norms."""
