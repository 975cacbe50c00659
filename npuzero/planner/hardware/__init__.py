"""Hardware model: clusters, networks and rates."""
