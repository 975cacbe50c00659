"""Run DeepSpeed's configurations and calls on npuzero, as of version 0.19.8.

In: a model, an optimizer and a DeepSpeed configuration. Out: ``initialize`` returns a ``DeepSpeedEngine`` with
DeepSpeed's methods; ``explain`` returns the decision for each key of the configuration.

Read ``door`` (``initialize``), ``configuration`` (from keys to an ``EngineRecipe``) and ``engine`` (the methods that a
training program calls) first. ``rules`` has one rule for each key.
"""

from npuzero.compat.deepspeed.configuration import explain
from npuzero.compat.deepspeed.door import InitializedEngine, initialize
from npuzero.compat.deepspeed.engine import DeepSpeedEngine
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.compat.deepspeed.rules import RULES, VERSION

__all__ = ["RULES", "VERSION", "DeepSpeedEngine", "EngineRecipe", "InitializedEngine", "explain", "initialize"]
