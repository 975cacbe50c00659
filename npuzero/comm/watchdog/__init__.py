"""Detect hangs of collectives: a status board shows where each rank waits, by the user's names of calls."""
