"""Optimizer states, parameters and activations on the host and on NVMe.

In: flat parameters with a placement off the device, their gradients, and an optimizer's rule (a launch).
Out: updated masters and moments in host memory or in files, and updated parameters on the device.

``OffloadedStates`` divides the offloaded shards into chunks and makes the state stores. ``OffloadedUpdate`` updates
chunk by chunk on a thread that overlaps with the program. ``ParameterLoader`` brings offloaded parameters to the device
before R1, and ``ActivationStorage`` keeps activations between forward and backward.

Read first: ``chunks.py``, ``host_states.py``, ``offloaded_update.py``.
"""
