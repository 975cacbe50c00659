"""The oracle: every op again in plain torch, slow and obvious, sharing nothing with the kernels.

Arguments are those the doors have checked.
"""
