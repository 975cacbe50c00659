"""Run InternEvo's configurations on npuzero without changes.

    from npuzero.compat import internevo

    config = internevo.load("7B_sft.py")
    model, optimizer, beta2_scheduler, lr_scheduler, mesh = internevo.initialize(model, config)

``evaluate`` reads the file without running it, ``keys`` and ``noted`` have a rule for each key, ``settle`` resolves
keys that depend on each other, and ``configuration`` builds mesh, plan, settings and optimizer. ``optimizer`` has
InternEvo's interface. Read ``start``, ``configuration`` and ``keys`` first.
"""

from npuzero.compat.internevo.configuration import Configuration, explain, load
from npuzero.compat.internevo.evaluate import evaluate
from npuzero.compat.internevo.keys import RULES
from npuzero.compat.internevo.optimizer import HybridZeroOptimizer
from npuzero.compat.internevo.start import InitializedTraining, initialize

__all__ = [
    "RULES",
    "Configuration",
    "HybridZeroOptimizer",
    "InitializedTraining",
    "evaluate",
    "explain",
    "initialize",
    "load",
]
