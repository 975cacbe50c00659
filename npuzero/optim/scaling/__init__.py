"""Loss scaling, and the guard against gradients that are not finite."""
