"""Connect ranks through the launcher's store: roll call, value exchange, restarts."""
