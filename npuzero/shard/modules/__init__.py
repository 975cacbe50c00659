"""Connect the engine to modules and parameters as programs see them.

In: the user's ``nn.Module`` and its parameters. Out: modules that run the engine's hooks around forward, parameters
that raise an error when read while sharded, and ``p.grad`` markers.

``attribute_overlay.py`` sets the engine's attributes on a module, ``module_to.py`` checks ``model.to()`` and similar
conversions, ``refuse_ddp.py`` refuses other engines around the model.

Read first: ``forward_wrapper.py``, ``sharded_tensor.py``, ``module_to.py``.
"""
