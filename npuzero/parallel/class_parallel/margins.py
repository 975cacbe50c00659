"""Margins for softmax over cosines: what makes the angle to a feature's own class count for more than it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CosineMargin(Protocol):
    """Change the cosine between a feature and its own class, for a loss that is to make it larger.

    Attributes:
        s: the factor of all cosines in the softmax.
    """

    @property
    def s(self) -> float: ...

    def __call__(self, cosine: Tensor) -> Tensor:
        """Return what stands in the place of ``cosine``, [n] float32, of each feature to its own class."""


@dataclass(frozen=True)
class ArcFace:
    """Add ``m`` to the angle between a feature and its class: s * cos(theta + m).

    Beyond the angle pi - m, where that would rise again, it is s * (cos(theta) - m * sin(m)), which goes on falling.

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
        sine = (1.0 - cosine.square()).clamp(min=1e-12).sqrt()  # its derivative is finite
        turned = cosine * math.cos(self.m) - sine * math.sin(self.m)
        return torch.where(cosine > -math.cos(self.m), turned, cosine - self.m * math.sin(self.m))


@dataclass(frozen=True)
class CosFace:
    """Take ``m`` from the cosine between a feature and its class: s * (cos(theta) - m).

    Source: Wang et al., CosFace: Large margin cosine loss for deep face recognition (2018), equation 4.

    Attributes:
        m: of the cosine; 0: a softmax over cosines as they are.
        s: the factor of all cosines.

    Example::

        head = npuzero.parallel.ClassHead(8, classes=10, mesh=npuzero.mesh(), margin=npuzero.parallel.CosFace(m=0.2))
    """

    m: float = 0.35
    s: float = 64.0

    def __call__(self, cosine: Tensor) -> Tensor:
        return cosine - self.m
