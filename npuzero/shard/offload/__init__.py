"""Optimizer states, parameters and activations on the host and on NVMe."""
