"""Output of commands: tables and pictures."""
