"""Watchdog of collectives: which rank is in which call, and which hang."""
