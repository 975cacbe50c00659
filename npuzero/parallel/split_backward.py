"""A backward pass in two halves: the gradients of a stage's inputs at once, those of its weights later.

What a weight's gradient needs is what arrives at the nodes where the way to the weight leaves the way to the inputs: it
is kept, and the second half starts from there (Qi et al. 2023, Zero Bubble Pipeline Parallelism). Which nodes these are
torch.distributed.pipelining finds out. Weights are known by their nodes alone, since they may be sharded by now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]


class Group:
    """Hold weights that share nodes, and what has arrived at these.

    Attributes:
        weights: the nodes that accumulate gradients of weights.
        nodes: where the ways to them leave the way to the inputs.
        arrived: gradients by node, one for each of its outputs.
    """

    def __init__(self, weights: Sequence[Node], nodes: Sequence[Node]) -> None:
        self.weights = weights
        self.nodes = nodes
        self.arrived: dict[Node, Gradients] = {}

    def keep(self, node: Node) -> Callable[[Gradients], None]:
        """Return a hook that keeps what arrives at ``node``."""

        def hook(gradients: Gradients) -> None:
            self.arrived[node] = gradients

        return hook


def input_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> list[Group]:
    """Add the gradients of ``inputs`` to their ``grad``; return what :func:`weight_gradients` needs.

    Args:
        outputs: that need gradients.
        gradients: of the outputs; None: ones.
        inputs: leaves that need gradients, one at least.
    """
    # Not at the top: it takes long to import, and few need it.
    from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

    graph = construct_reverse_graph([output.grad_fn for output in outputs if output.grad_fn is not None])
    leaves = [node for node in graph if hasattr(node, "variable")]
    given = {id(each) for each in inputs}
    weights = [node for node in leaves if id(node.variable) not in given]
    found: list[dict[str, Any]] = get_param_groups([node for node in leaves if node not in weights], weights, graph)
    groups = [Group(list(each["params"]), list(each["intermediates"])) for each in found]
    hooks = [node.register_prehook(group.keep(node)) for group in groups for node in group.nodes]
    try:
        made = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for tensor, gradient in zip(inputs, made, strict=True):
        tensor.grad = gradient
    return groups


def weight_gradients(groups: Sequence[Group]) -> dict[nn.Parameter, Tensor | None]:
    """Return the gradients of those weights that the outputs depend on."""
    found: dict[nn.Parameter, Tensor | None] = {}
    for group in groups:
        arrived = [
            (node, i, each) for node in group.nodes for i, each in enumerate(group.arrived[node]) if each is not None
        ]
        edges = [GradientEdge(node, i) for node, i, _ in arrived]
        # A node that another one of the group leads to must not get once more what arrived there.
        hooks = [node.register_prehook(_instead(group.arrived[node])) for node in group.nodes[1:] and group.nodes]
        try:
            made = torch.autograd.grad(
                edges, [GradientEdge(node, 0) for node in group.weights], [each for *_, each in arrived]
            )
        finally:
            for hook in hooks:
                hook.remove()
        found.update((node.variable, gradient) for node, gradient in zip(group.weights, made, strict=True))  # type: ignore[attr-defined]
    return found


def _instead(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _: gradients
