"""The rules of DeepSpeed's configuration keys, as of version 0.19.8.

In: nothing but literals. Out: ``RULES``, one ``KeyRule`` for each key, which ``translate_configuration`` reads. Read
``training`` (batch, precision, optimizer, schedule), ``zero`` (sharding and offload), then ``tools`` (the rest).
"""

from npuzero.compat.deepspeed.rules.tools import TOOLS
from npuzero.compat.deepspeed.rules.training import TRAINING, torch_option_rule
from npuzero.compat.deepspeed.rules.zero import ZERO
from npuzero.compat.rules import KeyRules

#: The DeepSpeed version that these keys are from.
VERSION = "0.19.8"
RULES = KeyRules((*TRAINING, *ZERO, *TOOLS))

__all__ = ["RULES", "VERSION", "torch_option_rule"]
