"""DeepSpeed's door: its configuration and its calls, as of version 0.19.8.

``rules`` has what becomes of each key, ``configuration`` what they say together, ``recipe`` what that comes to, and
``engine`` the calls of a training program.
"""

from npuzero.compat.deepspeed.configuration import explain
from npuzero.compat.deepspeed.door import InitializedEngine, initialize
from npuzero.compat.deepspeed.engine import DeepSpeedEngine
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.compat.deepspeed.rules import RULES, VERSION

__all__ = ["RULES", "VERSION", "DeepSpeedEngine", "EngineRecipe", "InitializedEngine", "explain", "initialize"]
