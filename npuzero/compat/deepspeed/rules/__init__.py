"""What becomes of each key of DeepSpeed's configuration, as of version 0.19.8."""

from npuzero.compat.deepspeed.rules.tools import TOOLS
from npuzero.compat.deepspeed.rules.training import TRAINING, torch_option_rule
from npuzero.compat.deepspeed.rules.zero import ZERO
from npuzero.compat.rules import KeyRules

#: The version whose keys these are.
VERSION = "0.19.8"
RULES = KeyRules((*TRAINING, *ZERO, *TOOLS))

__all__ = ["RULES", "VERSION", "torch_option_rule"]
