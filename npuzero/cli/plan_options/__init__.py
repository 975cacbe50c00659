"""Options of ``npuzero plan``, by topic."""
