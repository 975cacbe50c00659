"""Sizes of flat parameters, and what of them lies in which memory."""
