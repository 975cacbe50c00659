"""Margins for a softmax over cosines: enlarge the angle between a feature and its own class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CosineMargin(Protocol):
    """Change the cosine between a feature and its own class, in a loss that raises it.

    Attributes:
        s: the factor of all cosines in the softmax.
    """

    @property
    def s(self) -> float: ...

    def __call__(self, cosine: Tensor) -> Tensor:
        """Return the replacement of ``cosine``, [n] float32, between each feature and its own class."""


@dataclass(frozen=True)
class ArcFace:
    """Add ``m`` to the angle between a feature and its class: s * cos(theta + m).

    Beyond the angle pi - m that would rise again; there s * (cos(theta) - m * sin(m)) keeps falling.

    Source: Deng et al., ArcFace: Additive angular margin loss for deep face recognition (2019), equation 3.

    Attributes:
        m: radians.
        s: the factor of all cosines.

    Example::

        head = npuzero.parallel.ClassHead(8, classes=10, mesh=npuzero.mesh(), margin=npuzero.parallel.ArcFace(m=0.3))
    """

    m: float = 0.5
    s: float = 64.0

    def __call__(self, cosine: Tensor) -> Tensor:
        sine = (1.0 - cosine.square()).clamp(min=1e-12).sqrt()  # clamped so that its derivative is finite
        turned = cosine * math.cos(self.m) - sine * math.sin(self.m)
        return torch.where(cosine > -math.cos(self.m), turned, cosine - self.m * math.sin(self.m))


@dataclass(frozen=True)
class CosFace:
    """Subtract ``m`` from the cosine between a feature and its class: s * (cos(theta) - m).

    Source: Wang et al., CosFace: Large margin cosine loss for deep face recognition (2018), equation 4.

    Attributes:
        m: subtracted from the cosine; 0: a softmax over unchanged cosines.
        s: the factor of all cosines.

    Example::

        head = npuzero.parallel.ClassHead(8, classes=10, mesh=npuzero.mesh(), margin=npuzero.parallel.CosFace(m=0.2))
    """

    m: float = 0.35
    s: float = 64.0

    def __call__(self, cosine: Tensor) -> Tensor:
        return cosine - self.m
