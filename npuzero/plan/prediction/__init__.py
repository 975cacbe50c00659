"""Prediction of the bytes that a rank holds and sends in a step."""
