"""State of one unit: its flat parameters, gradients, initial values and life cycle."""
