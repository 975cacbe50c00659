"""Models given by their size or by the JSON of a transformers model: shapes of their units, and modules on meta."""

from npuzero.planner.models.families import KINDS
from npuzero.planner.models.shape import ModelShape, from_config, from_size

__all__ = ["KINDS", "ModelShape", "from_config", "from_size"]
