"""A fused rule: what must be known of an update that one launch applies to many shards, or to many parameters.

How a rule joins, after Adam's (``adam.py``):

* its op (``docs/adding-an-op.md``), whose line has ``master``, the moments by name, ``low``, ``remainder``, ``seed``;
* one file here: a final subclass of :class:`UpdateRule`, and one of :class:`~npuzero.optim.optimizer.ZeroOptimizer`
    whose
  ``__init__`` has the user's arguments and ends with ``self._open(Fused(the rule, ...), params, options)``; there are
  ``lr``, ``capturable`` and ``fused`` among the options;
* its name in ``optim/__init__.py``, ``api/__init__.py`` and ``npuzero/__init__.py``.

All else is here: masters and moments in fewer bits, chunks, step counts on the host or the device, loss scaling, graphs
that are captured, states in torch's shape, checkpoints, and the ranks' agreement on options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

#: One group's options by name, ``params`` among them.
Options = dict[str, Any]


class ParameterRange(NamedTuple):
    """Describe a parameter's part of the line, ``[begin, end)`` in elements: its group's options, its own step count.

    ``row``: the row of :class:`~npuzero.optim.rules.segments.CoefficientRows` that knows lr and step instead.
        ``stream`` and
    ``place``: as :class:`npuzero.ops.AdamSegment` has them, where something is rounded stochastically.
    """

    begin: int
    end: int
    options: Mapping[str, Any]
    step: int
    row: int | None = None
    stream: int = 0
    place: int | None = None


class RuleLine(Protocol):
    """Hold the buffers that launch after launch of an op writes, such as :class:`npuzero.ops.AdamLine`."""

    def is_of(self, *args: Any, **kwargs: Any) -> bool:
        """Tell whether these arguments, as it was made with them but for the seed, are its buffers still."""

    def update(
        self,
        grad: Sequence[Tensor],
        segments: Iterable[Any],
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        dynamic: Tensor | None = None,
    ) -> None:
        """Launch once: update what ``segments`` cover, and nothing else."""


class UpdateRule(ABC):
    """Describe an element-wise update, fused.

    Attributes:
        alike: who does the same in plain torch, or whoever else errors shall name.
        moments: the states of an element beside its master, by their names in ``state_dict``, in order; of each,
            whether it can be negative, which decides how 8 bits store it.
        line: makes a :class:`RuleLine` of its op.
        always: options that are the same in every group, whatever was given or loaded.
    """

    alike: str
    moments: ClassVar[Mapping[str, bool]]
    line: ClassVar[Callable[..., RuleLine]]
    always: Mapping[str, Any]

    @abstractmethod
    def defaults(self, options: Mapping[str, Any]) -> Options:
        """Check ``options``, among which there may be others than the rule's, and complete them.

        Raises:
            ConfigError, or ValueError and TypeError as torch's optimizers: one that no update can be made by.
        """

    @abstractmethod
    def kept(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return which of the moments parameters of a group have."""

    @abstractmethod
    def segment(self, first: ParameterRange, last: ParameterRange) -> Any:
        """Describe ``[first.begin, last.end)`` to the op's line: both are alike but for their place."""

    @abstractmethod
    def keeps_zeros(self, options: Mapping[str, Any]) -> bool:
        """Tell whether elements that are zero in every buffer stay so, as the padding between parameters must."""

    @abstractmethod
    def rows(
        self, options: Sequence[Mapping[str, Any]], steps: Sequence[float | Tensor], device: torch.device
    ) -> Tensor:
        """Return [rows, columns of the op] float32 on ``device``: what lr and step come to, without the host waiting.

        Args:
            options: of each row; lr may be a tensor of one element.
            steps: of each row the step count, this update included; a number or a tensor.
        """
