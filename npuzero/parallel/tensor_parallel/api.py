"""Tensor parallelism: divide Linears and embeddings over neighbouring ranks, which compute each layer together.

The model's modules keep their classes. ``tensor`` marks cuts and relations on the parameters, which ``npuzero.zero``
reads, and registers forward hooks that call the collectives. Call it before ``zero``::

    model = npuzero.parallel.tensor(model, mesh, mode="msp")
    model = npuzero.zero(model, stage=3, mesh=mesh)

With A = bytes of activations [batch, sequence, hidden] and R = (t - 1) / t over t ranks, a pair of Linears sends in
forward and backward:

    ====  =============================  =============================  ==================  ===============
    mode  before the region              after it                       bytes               norms' gradients
    ====  =============================  =============================  ==================  ===============
    mtp   nothing, all_reduce            all_reduce, nothing            4 R A               repeated
    msp   all_gather, reduce_scatter     reduce_scatter, all_gather     4 R A               summed
    fsp   as msp, and an all_gather in backward of inputs not saved     5 R A               summed
    ====  =============================  =============================  ==================  ===============

Sources: mtp is Megatron-LM (Shoeybi et al. 2019, section 3), msp its sequence parallelism (Korthikanti et al. 2022,
section 4.2.2), and fsp InternEvo's variant, which saves only slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npuzero.comm import Communicator, CountingCommunicator, Mesh
from npuzero.comm.mesh import check_mesh
from npuzero.errors import ConfigError, NpuZeroError, StateError, did_you_mean, refuse_unknown_keywords
from npuzero.parallel.class_parallel.vocabulary import cross_entropy
from npuzero.parallel.tensor_parallel.attention_heads import divide_attributes
from npuzero.parallel.tensor_parallel.collectives_around import (
    ColumnLinearInputs,
    RowLinearOutputs,
    ShardedEmbeddingRows,
    gather_output,
    slice_sequence_between,
)
from npuzero.parallel.tensor_parallel.divide import TensorDivision, build_tensor_division, get_linear, parent_path
from npuzero.parallel.tensor_parallel.plan_words import RuleKind, Words
from npuzero.plan import TENSOR, Relation, Sent
from npuzero.shard.layout.axis_relations import get_relation, relate_parameter
from npuzero.shard.layout.mesh_axes import bind_mesh, mark_divided
from npuzero.shard.layout.tensor_slices import cut_parameter

_Model = TypeVar("_Model", bound=nn.Module)
_SENT = "_npuzero_tensor_sent"
_SLICED = "_npuzero_sliced_blocks"


@dataclass(frozen=True)
class ActivationMode:
    """Describe how activations are stored between regions.

    Attributes:
        sliced: each rank has its slice of the sequence; else every rank has the full sequence.
        thrifty: save only this rank's slice of an all-gathered input for backward.
    """

    sliced: bool
    thrifty: bool


MODES = {"mtp": ActivationMode(False, False), "msp": ActivationMode(True, False), "fsp": ActivationMode(True, True)}


@refuse_unknown_keywords(tp_plan="plan", parallelize_plan="plan", device_mesh="mesh")
def tensor(model: _Model, mesh: Mesh, mode: str = "mtp", plan: Words | None = None) -> _Model:
    """Divide the layers of ``model`` over the tensor ranks of ``mesh``, on every rank, before :func:`npuzero.zero`.

    Every tensor rank of a group must see the same batch. Parameters stay unsharded until ``zero``, so they can be
    initialised or loaded as usual; run the model after ``zero`` only.

    Args:
        model: its Linears and Embeddings are divided; blocks in an nn.ModuleList take and return [batch, sequence,
            hidden].
        mesh: of all ranks, see :func:`npuzero.mesh`.
        mode: ``mtp``: every rank has the full activations between layers. ``msp``: each rank has its slice of the
            sequence there instead. ``fsp``: as msp, and saves only the slice of an all-gathered input. See
            docs/tensor.md.
        plan: words by patterns of module names, such as ``{"layers.*.mlp.up": "colwise", ...}``; None: the model's own
            (``base_model_tp_plan`` of transformers).

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: tensor ranks do not divide heads, key-value heads, features or the vocabulary; a pattern matches
            nothing; a word is refused or unknown; columns are cut without rows; a tied parameter is cut under one name
            only; there is dropout under mtp; ranks differ in mesh, mode or plan.
        StateError: the model is sharded already.

    Example::

        class Perceptron(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

            def forward(self, x):
                return self.down(self.up(x).relu())

        mesh = npuzero.mesh(tensor=1)
        model = npuzero.parallel.tensor(Perceptron(), mesh, plan={"up": "colwise", "down": "rowwise"})
        model = npuzero.zero(model, stage=2, mesh=mesh)
    """
    if mode not in MODES:
        do = did_you_mean(mode, list(MODES), "Choose one of them.")
        raise ConfigError("parallel.tensor(mode=...)", expected=f"one of {', '.join(MODES)}", got=repr(mode), do=do)
    if hasattr(model, _SENT) or hasattr(model, "_npuzero"):
        raise StateError(
            "parallel.tensor()",
            expected="a model that is neither divided nor sharded",
            got=f"{type(model).__name__}, which is",
            do="Call it once, before npuzero.zero().",
        )
    check_mesh("parallel.tensor()", mesh)
    ranks = mesh.size((TENSOR,))
    division = _agree_on_division(mesh, mode, lambda: build_tensor_division(model, plan, ranks, MODES[mode].sliced))
    sent = Sent()
    group = CountingCommunicator(mesh.communicator((TENSOR,), "tensor"), sent, mesh.shape.sizes((TENSOR,)))
    setattr(model, _SENT, sent)
    mark_parameters(model, division)
    mark_divided(model)
    bind_mesh(model, mesh)
    _register_rule_hooks(model, division, group, MODES[mode])
    for path in division.owners:
        divide_attributes(model.get_submodule(path), ranks)
    return model


def repeats_activations(model: nn.Module) -> bool:
    """Return whether tensor ranks hold the same activations between the blocks of ``model``."""
    return _SENT in vars(model) and sliced_blocks(model) is None


def tensor_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of activations that this rank has sent along the tensor axis, by collective.

    Raises:
        StateError: the model is not divided.

    Example::

        layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        mesh, plan = npuzero.mesh(tensor=1), {"0": "colwise", "2": "rowwise"}
        print(npuzero.parallel.tensor_bytes(npuzero.parallel.tensor(layers, mesh, plan=plan)))
    """
    sent: Sent | None = getattr(model, _SENT, None)
    if sent is None:
        raise StateError(
            "parallel.tensor_bytes()",
            expected="a model divided by parallel.tensor()",
            got=type(model).__name__,
            do="Divide it first.",
        )
    return {verb: nbytes for (_, verb), nbytes in sent.items()}


def sliced_blocks(model: nn.Module) -> tuple[str, str, int] | None:
    """Return (first block, last block, slices) of the blocks between which tensor ranks slice the sequence, or None."""
    found: tuple[str, str, int] | None = vars(model).get(_SLICED)
    return found


def _agree_on_division(mesh: Mesh, mode: str, make: Callable[[], TensorDivision]) -> TensorDivision:
    """Return the division that all ranks agree on; if a rank fails or differs, every rank raises."""
    error: NpuZeroError | None = None
    division = TensorDivision({})
    try:
        division = make()
    except NpuZeroError as refused:
        error = refused
    own = repr((division, str(error)))
    said = mesh.world.exchange(
        [repr(mesh), mode, hashlib.sha256(own.encode()).hexdigest()[:12], str(error or "")], "tensor"
    )
    if error is not None:
        raise error
    # Mesh and mode must match on all ranks, plan and model only within this rank's tensor group.
    group = [said[rank] for rank in mesh.ranks((TENSOR,))]
    for whose, known in (
        ("mesh and mode", [each[:2] for each in said]),
        ("plan and model", [each[2:] for each in group]),
    ):
        other = next((each for each in known if each != known[0]), None)
        if other is not None:
            raise ConfigError(
                f"parallel.tensor(): axis tensor: {whose}",
                expected=f"the same on all ranks: {known[0]}",
                got=f"{other} on another",
                do="Call it with equal arguments and models everywhere.",
            )
    return division


def mark_parameters(model: nn.Module, division: TensorDivision) -> None:
    """Mark cuts and relations on the parameters."""
    for name, cut in division.cuts.items():
        cut_parameter(model.get_parameter(name), cut)
    for name, parameter in model.named_parameters():
        said = division.relations.get(name) or get_relation(parameter, TENSOR)
        relate_parameter(parameter, TENSOR, said or Relation.REPEATED)


def _register_rule_hooks(model: nn.Module, division: TensorDivision, group: Communicator, mode: ActivationMode) -> None:
    """Register the hooks of all rules."""
    inputs_of: dict[tuple[str, bool], ColumnLinearInputs] = {}
    # Linears of one region share a ColumnLinearInputs, so that their common input is all-gathered once. Row Linears
    # come after: they look up the inputs of the region that they end, to release them.
    for around, columns in division.regions.items():
        for path in columns:
            sliced, linear = division.in_stack(path), get_linear(model, path)
            if (around, sliced) not in inputs_of:
                before = model.get_submodule(around) if around in division.gathered else None
                inputs_of[around, sliced] = ColumnLinearInputs(group, sliced, mode.thrifty and sliced, before)
            inputs_of[around, sliced].serve(linear)
            if division.words[path].whole:
                gather_output(linear, group)
    for path in division.of(RuleKind.ROWS):
        sliced = division.in_stack(path)
        inputs = inputs_of.get((division.ends.get(path, parent_path(path)), sliced))
        RowLinearOutputs(get_linear(model, path), group, sliced, division.words[path].whole, inputs)
    for path in division.of(RuleKind.VOCABULARY):
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding):
            ShardedEmbeddingRows(module, group, module.num_embeddings // group.size)
        else:
            ColumnLinearInputs(group, False, False).serve(get_linear(model, path))
            _shard_loss(model, group)
    if division.stack is not None:
        first, last = division.stack
        slice_sequence_between(model.get_submodule(first), model.get_submodule(last), group)
        setattr(model, _SLICED, (first, last, group.size))


def _shard_loss(model: Any, group: Communicator) -> None:
    """Make a causal transformers model compute its loss from logits with a sharded vocabulary."""
    if getattr(model, "loss_type", None) != "ForCausalLM":
        return

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_options: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        rows, targets = logits.flatten(0, -2), shift_labels.flatten().to(logits.device)
        found = cross_entropy(rows, targets, group, ignore_index=ignore_index, reduction=reduction)
        if num_items_in_batch is None:
            return found
        return found / torch.as_tensor(num_items_in_batch, device=found.device)

    model.loss_function = loss
