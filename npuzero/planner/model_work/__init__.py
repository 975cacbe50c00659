"""Work of a model: FLOPs, bytes and activations of its units."""
