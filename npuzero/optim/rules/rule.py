"""The interface of a fused rule: an element-wise update that one launch applies to many shards or parameters.

To add a rule, following Adam's (``adam.py``):

* write its op (``docs/adding-an-op.md``), whose line takes ``master``, the moments by name, ``low``, ``remainder`` and
  ``seed``;
* add one file here with a final subclass of :class:`UpdateRule`, and one of
  :class:`~npuzero.optim.optimizer.ZeroOptimizer` whose ``__init__`` takes the user's arguments and ends with
  ``self._open(FusedWorker(the rule, ...), params, options)``; the options include ``lr``, ``capturable`` and ``fused``;
* export its name in ``optim/__init__.py``, ``api/__init__.py`` and ``npuzero/__init__.py``.

Everything else is shared: low-precision masters and moments, chunks, step counts on the host or the device, loss
scaling, captured graphs, states in torch's shape, checkpoints, and the ranks' agreement on options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

#: The options of one group by name, including ``params``.
Options = dict[str, Any]


class ParameterRange(NamedTuple):
    """Describe a parameter's range ``[begin, end)`` of the line, in elements, with its group's options and its step
    count.

    ``row``: the row of :class:`~npuzero.optim.rules.segments.CoefficientRows` with lr and step instead. ``stream`` and
    ``place``: as in :class:`npuzero.ops.AdamSegment`, for stochastic rounding.
    """

    begin: int
    end: int
    options: Mapping[str, Any]
    step: int
    row: int | None = None
    stream: int = 0
    place: int | None = None


class RuleLine(Protocol):
    """Hold the buffers that launches of an op write, such as :class:`npuzero.ops.AdamLine`."""

    def is_of(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the line was made with these buffers; the arguments are the constructor's without the seed."""

    def update(
        self,
        grad: Sequence[Tensor],
        segments: Iterable[Any],
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        dynamic: Tensor | None = None,
    ) -> None:
        """Launch once: update the ranges of ``segments``, and nothing else."""


class UpdateRule(ABC):
    """Describe a fused element-wise update.

    Attributes:
        alike: the equivalent class in plain torch, or another name for errors.
        moments: the names of an element's states (without the master) in ``state_dict``, in order; each with whether it
            can be negative, which decides its encoding in 8 bits.
        line: makes a :class:`RuleLine` of the rule's op.
        always: options with fixed values in every group, also after a load.
    """

    alike: str
    moments: ClassVar[Mapping[str, bool]]
    line: ClassVar[Callable[..., RuleLine]]
    always: Mapping[str, Any]

    @abstractmethod
    def defaults(self, options: Mapping[str, Any]) -> Options:
        """Check ``options``, which may include some of other rules, and complete them.

        Raises:
            ConfigError, or ValueError and TypeError as torch's optimizers: an option has an invalid value.
        """

    @abstractmethod
    def kept(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the moments that parameters of a group have."""

    @abstractmethod
    def segment(self, first: ParameterRange, last: ParameterRange) -> Any:
        """Describe ``[first.begin, last.end)`` to the op's line; the two ranges differ only in their place."""

    @abstractmethod
    def keeps_zeros(self, options: Mapping[str, Any]) -> bool:
        """Return whether elements that are zero in every buffer stay zero, as padding between parameters must."""

    @abstractmethod
    def rows(
        self, options: Sequence[Mapping[str, Any]], steps: Sequence[float | Tensor], device: torch.device
    ) -> Tensor:
        """Return [rows, columns of the op] float32 on ``device``: coefficients of lr and step, without a sync.

        Args:
            options: of each row; lr may be a tensor of one element.
            steps: of each row the step count, including this update; a number or a tensor.
        """
