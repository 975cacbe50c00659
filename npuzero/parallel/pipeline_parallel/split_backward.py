"""Split a backward pass in two: input gradients at once, weight gradients later.

The path to a weight leaves the path to the inputs at some autograd nodes. The gradients that arrive at these nodes are
kept, and the second half starts from there (Qi et al. 2023, Zero Bubble Pipeline Parallelism). Weights are known by
their nodes alone, since they may be resharded by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]

#: The node of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)``.
_REENTRANT = "CheckpointFunctionBackward"


class WeightGroup:
    """Hold weights that share nodes, and the gradients that have arrived there.

    Attributes:
        weights: the nodes that accumulate gradients of weights.
        nodes: where the paths to them leave the path to the inputs.
        arrived: gradients by node, one for each of the node's outputs.
    """

    def __init__(self, weights: Sequence[Node], nodes: Sequence[Node]) -> None:
        self.weights = weights
        self.nodes = nodes
        self.arrived: dict[Node, Gradients] = {}

    def keep(self, node: Node) -> Callable[[Gradients], None]:
        """Return a hook that stores the gradients arriving at ``node``."""

        def hook(gradients: Gradients) -> None:
            self.arrived[node] = gradients

        return hook


def input_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> list[WeightGroup] | None:
    """Set the ``grad`` of ``inputs``; return the groups that :func:`weight_gradients` needs.

    Args:
        outputs: tensors that require gradients.
        gradients: gradients of the outputs; None: ones.
        inputs: leaves that require gradients, at least one.

    Returns:
        None, without computing, if the graph has reentrant checkpointing: it runs one backward pass of its own for
            inputs and weights together.
    """
    graph = _reverse_graph(output.grad_fn for output in outputs)
    if any(node.name() == _REENTRANT for node in graph):
        return None
    given = {id(each) for each in inputs}
    leaves = [node for node in graph if hasattr(node, "variable")]
    ways = _find_leading_nodes([node for node in leaves if id(node.variable) in given], graph)
    groups = _group_weights([node for node in leaves if id(node.variable) not in given], ways, graph)
    hooks = [node.register_prehook(group.keep(node)) for group in groups for node in group.nodes]
    # The graph must survive this pass: the second half runs backward through it again.
    try:
        made = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for tensor, gradient in zip(inputs, made, strict=True):
        tensor.grad = gradient
    return groups


def weight_gradients(groups: Sequence[WeightGroup]) -> dict[nn.Parameter, Tensor | None]:
    """Return the gradients of the weights that the outputs depend on."""
    found: dict[nn.Parameter, Tensor | None] = {}
    for group in groups:
        arrived = [
            (node, i, each) for node in group.nodes for i, each in enumerate(group.arrived[node]) if each is not None
        ]
        edges = [GradientEdge(node, i) for node, i, _ in arrived]
        # A node that another node of the group leads to must not receive its gradient a second time.
        hooks = [
            node.register_prehook(_make_replacing_hook(group.arrived[node])) for node in group.nodes[1:] and group.nodes
        ]
        try:
            made = torch.autograd.grad(
                edges, [GradientEdge(node, 0) for node in group.weights], [each for *_, each in arrived]
            )
        finally:
            for hook in hooks:
                hook.remove()
        found.update((node.variable, gradient) for node, gradient in zip(group.weights, made, strict=True))  # type: ignore[attr-defined]
    return found


def _make_replacing_hook(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _: gradients


#: The predecessors of each node: nodes that lead to it.
_Graph = dict[Node, list[Node]]


def _reverse_graph(roots: Iterable[Node | None]) -> _Graph:
    """Return autograd's graph reachable from ``roots``, with reversed edges."""
    found: _Graph = {root: [] for root in roots if root is not None}
    ahead = deque(found)
    while ahead:
        node = ahead.popleft()
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found[following] = []
                ahead.append(following)
            if following is not None:
                found[following].append(node)
    return found


def _find_leading_nodes(nodes: Iterable[Node], graph: _Graph, until: Container[Node] = ()) -> dict[Node, bool]:
    """Return ``nodes`` and their predecessors, stopping at ``until``; each with whether it is in ``until``."""
    found = dict.fromkeys(nodes, False)
    ahead = deque(found)
    while ahead:
        for leading in graph[ahead.popleft()]:
            if leading not in found:
                found[leading] = leading in until
                if not found[leading]:
                    ahead.append(leading)
    return found


def _group_weights(weights: Iterable[Node], ways: Container[Node], graph: _Graph) -> list[WeightGroup]:
    """Group weights that leave the path to the inputs at a common node."""
    groups: list[WeightGroup] = []
    for weight in weights:
        nodes = [node for node, on_the_way in _find_leading_nodes([weight], graph, ways).items() if on_the_way]
        # A new weight joins every group that it shares a node with, so groups stay disjoint and each node starts once.
        shared = [group for group in groups if not set(nodes).isdisjoint(group.nodes)]
        groups = [group for group in groups if group not in shared]
        joined = dict.fromkeys([*(node for group in shared for node in group.nodes), *nodes])
        groups.append(WeightGroup([*(each for group in shared for each in group.weights), weight], list(joined)))
    return groups
