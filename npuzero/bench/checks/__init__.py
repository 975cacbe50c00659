"""Checks of an installation: setup, ops and training steps."""
