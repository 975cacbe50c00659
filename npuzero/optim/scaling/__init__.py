"""Loss scaling, and the guard against gradients that are not finite.

In: the loss, and gradients before the step. Out: a scaled loss, unscaled gradients, and steps that are skipped or
raise. Read ``loss_scale`` (the rule, on the device), ``loss_scaler`` (torch's interface) and ``finite_guard``.
"""
