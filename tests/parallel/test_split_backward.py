"""The two halves of a backward pass make, together, the gradients of one pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npuzero.parallel.pipeline_parallel.split_backward import input_gradients, weight_gradients


def assert_equal_halves(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None) -> None:
    run = run or model
    x = torch.randn(3, 8, requires_grad=True)
    output = run(x)
    wanted = torch.autograd.grad(output.square().sum(), (x, *model.parameters()), retain_graph=True, allow_unused=True)
    loss = output.square().sum()
    groups = input_gradients([loss], None, [x])
    del output, loss
    found = weight_gradients(groups)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted[0], rtol=0, atol=0)
    for parameter, expected in zip(model.parameters(), wanted[1:], strict=True):
        assert parameter.grad is None
        if expected is None:
            assert parameter not in found
        else:
            torch.testing.assert_close(found[parameter], expected)


def test_a_chain():
    assert_equal_halves(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8, bias=False)))


def test_a_weight_used_twice():
    linear = nn.Linear(8, 8)
    assert_equal_halves(linear, lambda x: linear(torch.tanh(linear(x))))
    assert_equal_halves(linear, lambda x: x @ (linear.weight @ linear.weight) + linear(x))


def test_residuals_attention_and_an_unused_weight():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + self.out(torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0])

    assert_equal_halves(Attention())


@pytest.mark.parametrize("reentrant", [False])
def test_activation_checkpointing(reentrant: bool):
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    assert_equal_halves(block, lambda x: checkpoint(block, x, use_reentrant=reentrant))


def test_a_weight_beside_the_way_of_the_inputs():
    positions = nn.Embedding(3, 8)
    assert_equal_halves(positions, lambda x: x + positions(torch.arange(3)))
