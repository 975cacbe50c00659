"""An embedding and a cross entropy over a sharded vocabulary, against torch's own in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npuzero.comm import SingleWorld, World, run_threads
from npuzero.errors import ContractError
from npuzero.parallel import functions
from npuzero.parallel.class_parallel import vocabulary

N, H = 7, 5

#: Ranks, real classes, classes per rank. In the last case a rank has only padding.
SIZES = ((1, 8, 8), (2, 8, 4), (3, 10, 4), (4, 5, 2))


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_targets(classes: int, *shape: int) -> Tensor:
    """Return labels, some of them ignored."""
    found = torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))
    return found.masked_fill(torch.arange(found.numel()).view(shape) % 3 == 1, -100)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("reduction", vocabulary.REDUCTIONS)
@pytest.mark.parametrize(("ranks", "classes", "local"), SIZES)
def test_cross_entropy(ranks: int, classes: int, local: int, reduction: str, smoothing: float) -> None:
    """Return large logits, with exponentials that overflow unless the maximum is subtracted; padding is largest."""
    logits = 50 * draw_normal(2, N, local * ranks)
    logits[..., classes:] = 1e4
    target, weight = (
        draw_targets(classes, 2, N),
        draw_normal(2, N, seed=2) if reduction == "none" else torch.tensor(3.0),
    )
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}

    def body(world: World) -> tuple[Tensor, Tensor]:
        mine = logits.chunk(ranks, -1)[world.rank].clone().requires_grad_()
        group = world.communicator(range(ranks), "tensor")
        loss = vocabulary.cross_entropy(mine, target, group, vocabulary=classes, **options)
        (loss * weight).sum().backward()
        return loss.detach(), mine.grad

    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole[..., :classes].flatten(0, 1), target.flatten(), **options)
    (expected * weight.flatten()).sum().backward()
    found = run_threads(ranks, body)
    for loss, _ in found:
        assert loss.equal(found[0][0])
        assert loss.shape == weight.shape
        assert relative_error(loss.flatten(), expected) < 1e-6
    assert relative_error(torch.cat([grad for _, grad in found], -1), whole.grad) < 1e-5


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_computed_in_float32(dtype: torch.dtype) -> None:
    logits, target = draw_normal(64, 2000).to(dtype), draw_targets(2000, 64)

    def body(world: World) -> tuple[Tensor, Tensor]:
        mine = logits.chunk(2, -1)[world.rank].clone().requires_grad_()
        loss = vocabulary.cross_entropy(mine, target, world.communicator(range(2), "tensor"))
        loss.backward()
        return loss.detach(), mine.grad

    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole, target)
    expected.backward()
    for rank, (loss, grad) in enumerate(run_threads(2, body)):
        assert loss.dtype == torch.float32
        assert abs(loss - expected) < 1e-6 * expected
        assert grad.dtype == dtype
        assert torch.allclose(grad.double(), whole.grad.chunk(2, -1)[rank], rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_gradients_by_differences() -> None:
    def body(world: World) -> None:
        group = world.communicator(range(2), "tensor")
        whole, target = draw_normal(3, 8).double().requires_grad_(), draw_targets(8, 3)

        def loss(whole: Tensor) -> Tensor:
            mine = functions.split_replicated(whole, group, 1)
            return vocabulary.cross_entropy(mine, target, group, vocabulary=7, label_smoothing=0.2)

        assert torch.autograd.gradcheck(loss, whole)

    run_threads(2, body)


class AllocationCounter(TorchDispatchMode):
    """Record all memory that operators allocate, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        result = func(*args, **kwargs or {})
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.made[each.untyped_storage().data_ptr()] = each.untyped_storage()
        return result

    def above(self, nbytes: int) -> list[int]:
        return [storage.nbytes() for storage in self.made.values() if storage.nbytes() > nbytes]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_float_copy_of_the_logits_at_a_time(dtype: torch.dtype) -> None:
    n, local = 32, 1024
    mine = draw_normal(n, local).to(dtype).requires_grad_()
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    group = SingleWorld(torch.device("cpu")).communicator((0,), "tensor")
    with AllocationCounter() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = vocabulary.cross_entropy(mine, draw_targets(local, n), group)
    with AllocationCounter() as backward:
        loss.backward()
    assert forward.above(n * local) == [4 * n * local]
    assert backward.above(n * local) == [4 * n * local, *([2 * n * local] if dtype == torch.bfloat16 else [])]
    assert sum(each.nbytes for each in kept if each.data_ptr() != mine.data_ptr()) < n * local


@pytest.mark.parametrize(("ranks", "classes", "local"), SIZES)
def test_embedding(ranks: int, classes: int, local: int) -> None:
    table, ids, weight = (
        draw_normal(local * ranks, H),
        draw_targets(classes, 2, N).abs() % classes,
        draw_normal(2, N, H, seed=3),
    )

    def body(world: World) -> tuple[Tensor, Tensor]:
        mine = table.chunk(ranks)[world.rank].clone().requires_grad_()
        rows = vocabulary.sharded_embedding(ids, mine, world.communicator(range(ranks), "tensor"), vocabulary=classes)
        (rows * weight).sum().backward()
        return rows.detach(), mine.grad

    whole = table.clone().requires_grad_()
    (F.embedding(ids, whole) * weight).sum().backward()
    found = run_threads(ranks, body)
    assert all(rows.equal(F.embedding(ids, table)) for rows, _ in found)
    assert torch.cat([grad for _, grad in found]).allclose(whole.grad, rtol=1e-6)


def test_another_ranks_rows_are_no_matter_of_this_ones() -> None:
    """Row 0 stands in for ids on other ranks: none of its values may leak, not even a NaN."""

    def body(world: World) -> Tensor:
        mine = torch.full((2, H), torch.nan) if world.rank == 0 else torch.ones(2, H)
        return vocabulary.sharded_embedding(torch.tensor([2, 3]), mine, world.communicator(range(2), "tensor"))

    assert all(rows.equal(torch.ones(2, H)) for rows in run_threads(2, body))


def test_rows_of_minus_infinity() -> None:
    """A rank with only masked classes contributes nothing."""

    def body(world: World) -> tuple[Tensor, Tensor]:
        mine = (draw_normal(3, 4) if world.rank else torch.full((3, 4), -torch.inf)).requires_grad_()
        loss = vocabulary.cross_entropy(mine, torch.tensor([4, 5, 6]), world.communicator(range(2), "tensor"))
        loss.backward()
        return loss.detach(), mine.grad

    (loss, masked), (_, grad) = run_threads(2, body)
    assert torch.allclose(loss, F.cross_entropy(draw_normal(3, 4), torch.arange(3)))
    assert not masked.any() and grad.isfinite().all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocabulary": 9}, "Pad to 5 classes"),
    "no vocabulary": ({"vocabulary": 0}, "1 to 8"),
    "shape": ({"target": torch.zeros(2, dtype=torch.int64)}, "(3,)"),
    "target": ({"target": torch.tensor([1, 8, -100])}, "0 to 7, or -100; got 8"),
    "padding": ({"target": torch.tensor([1, 7, -100]), "vocabulary": 7}, "0 to 6"),
    "smoothing": ({"label_smoothing": 1.5}, "from 0 to 1"),
    "reduction": ({"reduction": "average"}, "'average'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_on_every_rank(name: str) -> None:
    def body(world: World) -> str:
        options, text = REFUSED[name]
        given = {"target": torch.zeros(3, dtype=torch.int64), **options}
        with pytest.raises(ContractError) as refused:
            vocabulary.cross_entropy(torch.zeros(3, 4), group=world.communicator(range(2), "tensor"), **given)
        return text in str(refused.value) or str(refused.value)

    assert run_threads(2, body) == [True, True]


@pytest.mark.parametrize("ids", ((0, 8), (-1, 0), (0, 7)))
def test_ids_outside_are_refused_on_every_rank(ids: tuple[int, int]) -> None:
    def body(world: World) -> None:
        with pytest.raises(IndexError):
            vocabulary.sharded_embedding(
                torch.tensor(ids), torch.zeros(4, H), world.communicator(range(2), "x"), vocabulary=7
            )

    run_threads(2, body)
