"""Models given by a size or by the JSON of a transformers model: shapes of their units, and modules on meta.

In: a number of parameters, or the keys of a config.json. Out: a ModelShape, from transformers if it is installed
(classes.py), else from the rules of families.py. Read shape.py, families.py and classes.py first.
"""

from npuzero.planner.models.families import KINDS
from npuzero.planner.models.shape import ModelShape, from_config, from_size

__all__ = ["KINDS", "ModelShape", "from_config", "from_size"]
