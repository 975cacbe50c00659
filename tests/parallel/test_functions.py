"""Functions over a communicator, each compared with one process that has the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from npuzero.comm import Communicator, World, run_threads
from npuzero.errors import ContractError
from npuzero.parallel import functions

RANKS = (2, 3)
SHAPE = (6, 12, 2)  # divisible by all RANKS along the first two dimensions
Function = Callable[[Tensor, Communicator], Tensor]

#: Each function on the tensors of all ranks in one process; whether all ranks hold equal inputs, and equal results.
CASES: dict[str, tuple[Function, Callable[[list[Tensor]], list[Tensor]], bool, bool]] = {
    "copy": (functions.copy_to_ranks, lambda xs: xs, True, False),
    "total": (functions.all_reduce_sum, lambda xs: [sum_tensors(xs)] * len(xs), False, True),
    **{
        f"{name}{dim}": (lambda x, c, f=function, d=dim: f(x, c, d), oracle, alike_in, alike_out)
        for dim in (0, 1, -2)
        for name, function, oracle, alike_in, alike_out in (
            ("gather", functions.all_gather_dim, lambda xs, d=dim: [torch.cat(xs, d)] * len(xs), False, False),
            (
                "scatter",
                functions.reduce_scatter_dim,
                lambda xs, d=dim: list(sum_tensors(xs).chunk(len(xs), d)),
                False,
                False,
            ),
            ("collect", functions.gather_replicated, lambda xs, d=dim: [torch.cat(xs, d)] * len(xs), False, True),
            ("split", functions.split_replicated, lambda xs, d=dim: list(xs[0].chunk(len(xs), d)), True, False),
        )
    },
    **{
        f"swap{s}{g}": (
            lambda x, c, s=s, g=g: functions.all_to_all_dims(x, c, s, g),
            lambda xs, s=s, g=g: [torch.cat([x.chunk(len(xs), s)[r] for x in xs], g) for r in range(len(xs))],
            False,
            False,
        )
        for s, g in ((0, 1), (1, 0), (1, -1), (-2, 0))
    },
}


def sum_tensors(xs: list[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def draw_small_integers(seed: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small integers: their sums, and sums of their products, are exact in every dtype and order."""
    return torch.randint(-3, 4, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_rank_inputs(ranks: int, alike: bool, dtype: torch.dtype) -> list[Tensor]:
    return [draw_small_integers(0 if alike else 1 + rank, SHAPE, dtype) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, ranks: int) -> None:
    """Return the loss over all ranks: a result that is equal on all ranks counts once, others count per rank."""
    function, oracle, alike_in, alike_out = CASES[name]
    dtypes = (torch.float32, torch.bfloat16, torch.float64)

    def expected(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        xs = [x.requires_grad_() for x in draw_rank_inputs(ranks, alike_in, dtype)]
        if alike_in:
            xs = [xs[0]] * ranks
        ys = oracle(xs)
        counted = ys[:1] if alike_out else ys
        loss = sum((y.square() * weight(rank, y)).sum() for rank, y in enumerate(counted))
        loss.backward()
        return [y.detach() for y in ys], [x.grad for x in xs]

    def weight(rank: int, y: Tensor) -> Tensor:
        return draw_small_integers(100 + rank, y.shape, y.dtype)

    def body(world: World) -> list[tuple[Tensor, Tensor]]:
        group = world.communicator(range(world.size), "case")
        results = []
        for dtype in dtypes:
            x = draw_rank_inputs(ranks, alike_in, dtype)[world.rank].requires_grad_()
            y = function(x, group)
            assert y.is_contiguous()
            (y.square() * weight(0 if alike_out else world.rank, y)).sum().backward()
            results.append((y.detach(), x.grad))
        return results

    found = run_threads(ranks, body)
    for i, dtype in enumerate(dtypes):
        for rank, (y, grad) in enumerate(zip(*expected(dtype), strict=True)):
            assert found[rank][i][0].equal(y), (dtype, rank)
            assert found[rank][i][1].equal(grad), (dtype, rank)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    """A gradient penalty: the backward of a backward is the function itself."""
    function, oracle, alike_in, alike_out = CASES[name]

    def penalty(xs: list[Tensor], ys: list[Tensor]) -> None:
        loss = sum(y.pow(3).sum() for y in ys)
        sum(grad.square().sum() for grad in torch.autograd.grad(loss, xs, create_graph=True)).backward()

    def body(world: World) -> Tensor:
        x = draw_rank_inputs(2, alike_in, torch.float64)[world.rank].requires_grad_()
        penalty([x], [function(x, world.communicator(range(2), "case"))])
        return x.grad

    xs = [x.requires_grad_() for x in draw_rank_inputs(2, alike_in, torch.float64)][: 1 if alike_in else 2]
    ys = oracle([xs[0], xs[-1]])
    penalty(xs, ys[:1] if alike_out else ys)
    for grad, x in zip(run_threads(2, body), [xs[0], xs[-1]], strict=True):
        assert grad.equal(x.grad)


def test_sums_are_in_the_order_of_ranks() -> None:
    """Values over many exponents, so that another order gives other bits; the bits are the same on all ranks."""
    drawn = [torch.randn(8, 4) * torch.exp2(torch.randint(-9, 9, (8, 4)).float()) for _ in range(3)]

    def body(world: World) -> tuple[Tensor, Tensor]:
        group = world.communicator(range(3), "case")
        x = torch.ones(8, 4, requires_grad=True)
        functions.copy_to_ranks(x, group).backward(drawn[world.rank])
        return functions.all_reduce_sum(drawn[world.rank], group), x.grad

    for total, grad in run_threads(3, body):
        assert total.equal(sum_tensors(drawn))
        assert grad.equal(sum_tensors(drawn))


@pytest.mark.parametrize("name", CASES)
def test_inputs_need_not_be_contiguous_and_results_may_be_written(name: str) -> None:
    function = CASES[name][0]

    def body(world: World) -> None:
        group = world.communicator(range(2), "case")
        x = draw_small_integers(world.rank, (4, 6, 8), torch.float32).transpose(0, 1)[..., ::2]
        y, expected = (function(each.detach().requires_grad_(), group) for each in (x, x.contiguous()))
        assert y.equal(expected)
        if name != "copy":
            y.add_(1)
        y.sum().backward()  # an expanded gradient

    run_threads(2, body)


def test_one_rank_sends_nothing() -> None:
    def body(world: World) -> None:
        group = world.communicator((0,), "alone")
        x = torch.randn(SHAPE, requires_grad=True)
        assert all(function(x, group) is x for function, *_ in CASES.values())
        assert group.started == 0

    run_threads(1, body)


REFUSED: dict[str, tuple[Function, str]] = {
    "split": (lambda x, c: functions.split_replicated(x, c, 0), "Use 1, 2, 4 or 8 ranks, or pad to 9"),
    "scatter": (lambda x, c: functions.reduce_scatter_dim(x, c, -1), "Use 1 or 5 ranks, or pad to 6"),
    "swap": (lambda x, c: functions.all_to_all_dims(x, c, 0, 1), "Use 1, 2, 4 or 8 ranks"),
    "no dimension": (lambda x, c: functions.all_gather_dim(x, c, 2), "-2 to 1"),
    "no dimension -3": (lambda x, c: functions.gather_replicated(x, c, -3), "-2 to 1"),
    "one dimension": (lambda x, c: functions.all_to_all_dims(x, c, 1, -1), "that differ"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_divide_is_refused_on_every_rank(name: str) -> None:
    function, text = REFUSED[name]

    def body(world: World) -> str:
        with pytest.raises(ContractError) as refused:
            function(torch.zeros(8, 5), world.communicator(range(3), "case"))
        return str(refused.value)

    assert all(text in message for message in run_threads(3, body))
