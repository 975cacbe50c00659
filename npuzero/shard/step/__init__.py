"""One training step: forward, backward, the step boundary and the optimizer update.

In: hooks on modules and autograd, and the program's calls between backward and ``step()`` (clipping, unscaling, norms).
Out: units unsharded and resharded (``parameters/``), gradients reduced (``gradients/``), and parameters and optimizer
states updated, on the device or offloaded (``offload/``).

Read first: ``autograd_hooks.py`` (the order of events for a unit; the only file that touches autograd),
``forward_backward.py`` (the reaction to each event), ``step_boundary.py`` (gradients between backward and the update).
"""
