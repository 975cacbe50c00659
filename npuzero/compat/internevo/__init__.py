"""InternEvo's door: a configuration goes in as it is, and the same training comes out.

    from npuzero.compat import internevo

    config = internevo.load("7B_sft.py")
    model, optimizer, beta2_scheduler, lr_scheduler, mesh = internevo.initialize(model, config)

``evaluate`` finds what the file says without running it; ``keys`` and ``noted`` say what becomes of each key, and
``settle`` what several say together; ``configuration`` is what that comes to; ``optimizer`` has InternEvo's interface.
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
