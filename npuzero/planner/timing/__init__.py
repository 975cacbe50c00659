"""Step time and memory of a schedule on a cluster."""
