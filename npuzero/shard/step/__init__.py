"""One training step: forward, backward, the step boundary and the optimizer update."""
