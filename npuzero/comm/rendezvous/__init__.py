"""Rendezvous of ranks: the store, the roll call, exchanged values, restarts."""
