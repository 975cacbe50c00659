"""Modules and parameters as programs see them: wrappers of forward, sharded parameters, conversions."""
