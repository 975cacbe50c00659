"""torch's lazy negatives: what an op reads in memory is not what torch shows, so no op takes one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npuzero import ContractError, ops
from npuzero.ops.storage.lazy import materialize_lazy


def lazily_negative(values: torch.Tensor) -> torch.Tensor:
    """One element; contiguous, as parts of a complex tensor of one element are."""
    found = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert found.is_neg() and found.is_contiguous() and torch.equal(found, values)
    return found


LAZY = lazily_negative(torch.ones(1))
ONE, LOW = torch.ones(1), torch.ones(1, dtype=torch.bfloat16)


def lazy_adam_call(**some: torch.Tensor) -> Callable[[], object]:
    buffers = {"master": torch.ones(1), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1), "grad": torch.ones(1)}
    segment = ops.AdamSegment(0, 1, 1.0, 0.9, 0.9, 1e-8, 0.0, 1, decoupled=True, maximize=False, amsgrad=False)
    return lambda: ops.flat_adam(**{**buffers, **some}, segments=[segment])


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.cast(LAZY, LOW.clone()),
        lambda: ops.cast(LOW, LAZY),
        lambda: ops.pack([ONE, LAZY], [0, 1], torch.zeros(2)),
        lambda: ops.pack([ONE], [0], LAZY),
        lambda: ops.pack([ONE], [0], torch.zeros(1), scale=LAZY),
        lambda: ops.unpack(torch.ones(2), [torch.zeros(1), LAZY], [0, 1]),
        lambda: ops.norm(LAZY, torch.zeros(2, dtype=torch.float64)),
        lazy_adam_call(master=LAZY),
        lazy_adam_call(exp_avg=LAZY),
        lazy_adam_call(grad=LAZY),
    ],
)
def test_a_lazy_negative_is_refused_by_every_op(call: Callable[[], object]) -> None:
    with pytest.raises(ContractError, match=r"lazy negative.*resolve_neg\(\), and resolve_conj\(\)"):
        call()
    assert torch.equal(LAZY, ONE)


def test_settled_has_the_values_in_its_memory() -> None:
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    for tensor in (LAZY, conjugate, conjugate.imag, torch.ones(2, 3).t(), torch.ones(3)):
        found = materialize_lazy(tensor)
        assert torch.equal(found, tensor) and found.is_contiguous() and not found.is_neg() and not found.is_conj()
    assert materialize_lazy(ONE) is ONE
