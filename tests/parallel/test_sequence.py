"""Sequences divided over ranks: training equals one process with full sequences; bytes, memory, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import npuzero
from npuzero import ConfigError, Plan, parallel
from npuzero.comm import World, run_threads
from npuzero.plan import MeshShape
from parallel.sequence_training import DIM, SEQUENCE, SequenceRecipe, check_sequence_training, train_sequence_rank
from world.train import assert_same_bits

EIGHT = [
    (weight, sequence, pod, kind)
    for weight in (2, 4, 8)
    for sequence in (2, 4, 8)
    for pod in (1, 2, 4)
    if weight * pod <= 8
    for kind in ("sgd", "adamw")
]


def isp_plan(weight: int) -> Plan:
    return Plan.preset("isp", local_size=weight)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("sequence", "pod"), [(2, 1), (2, 2), (4, 1)])
def test_isp_trains_as_one_process(sequence: int, pod: int, kind: str) -> None:
    """Shard states over all ranks (one pod), or over the weight ranks only (one pod per group of them)."""
    check_sequence_training(4, isp_plan(2), {"sequence": sequence, "pod": pod}, SequenceRecipe(kind, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "sequence", "pod", "kind"), EIGHT)
def test_isp_on_eight_ranks(weight: int, sequence: int, pod: int, kind: str) -> None:
    """Weight ranks may differ from the ranks that share sequences; two pods of two groups are zero1 over some ranks."""
    check_sequence_training(8, isp_plan(weight), {"sequence": sequence, "pod": pod}, SequenceRecipe(kind))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [2, 8])
@pytest.mark.parametrize("weight", [2, 4, 8])
def test_isp_on_sixteen_ranks(weight: int, sequence: int) -> None:
    check_sequence_training(16, isp_plan(weight), {"sequence": sequence, "pod": 2 if weight < 8 else 1})


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_sequences_are_divided_under_other_plans(plan: str) -> None:
    check_sequence_training(4, plan, {"sequence": 2}, SequenceRecipe(steps=2, micro_batches=2))


def test_micro_batches_are_one_mean_over_their_tokens() -> None:
    check_sequence_training(4, isp_plan(2), {"sequence": 4}, SequenceRecipe(steps=2, micro_batches=3))


def test_ranks_keep_their_part_of_the_activations() -> None:
    kept = {
        ranks: run_threads(
            ranks, lambda world, n=ranks: train_sequence_rank(world, "zero2", {"sequence": n}, SequenceRecipe(steps=1))
        )
        for ranks in (1, 2, 4, 8)
    }
    for ranks, found in kept.items():
        assert {each["kept"] * ranks for each in found} == {kept[1][0]["kept"]} != {0}


def test_two_layers_are_unsharded_at_a_time_however_many_there_are() -> None:
    """The window: the peak is the same in each step from the second on, and for twice the layers."""
    held = {
        layers: run_threads(
            4,
            lambda world, n=layers: train_sequence_rank(
                world, isp_plan(2), {"sequence": 4}, SequenceRecipe(steps=4), n
            ),
        )
        for layers in (3, 6)
    }
    for found in held.values():
        for each in found:
            assert each["held"][1] == each["held"][2] == each["held"][3]
    few, many = (found[0]["held"][3] for found in held.values())
    layer = 4 * (4 * DIM * DIM + 4 * DIM * DIM)  # its matrices, in bytes
    assert few["buffers"] < many["buffers"] + layer and many["buffers"] < few["buffers"] + layer
    assert many["parameters"] > few["parameters"] + layer


@pytest.mark.parametrize("overlap", [False, "gradients", "parameters"])
def test_overlap_moves_no_bit(overlap: Any) -> None:
    sizes, recipe = {"sequence": 4}, SequenceRecipe(steps=2)
    found = [
        run_threads(
            4,
            lambda world, how=how: train_sequence_rank(
                world, isp_plan(2), sizes, recipe, settings=npuzero.Settings(overlap=how, prefetch=2 if how else 0)
            ),
        )
        for how in (True, overlap)
    ]
    for mine, other in zip(*found, strict=True):
        assert_same_bits(mine["state"], other["state"])


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "keys", "ranks"), [(4, 4, 2), (4, 2, 2), (4, 1, 2), (12, 2, 4), (12, 3, 4), (6, 2, 3)]
)
def test_fewer_key_heads_than_ranks(heads: int, keys: int, ranks: int) -> None:
    """Heads are repeated; the gradients of the copies are summed into the original head."""
    draw = torch.Generator().manual_seed(heads + keys)
    q, k, v, weight = (torch.randn(2, n, 12, 4, generator=draw) for n in (heads, keys, keys, heads))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def rank(world: World) -> list[Tensor]:
        mesh = npuzero.mesh(sequence=ranks, world=world)
        mine = [x.chunk(ranks, 2)[world.rank].clone().requires_grad_() for x in (q, k, v)]
        out = parallel.attention(attend, mesh)(*mine)
        (out * weight.chunk(ranks, 2)[world.rank]).sum().backward()
        return [out.detach(), *(x.grad for x in mine if x.grad is not None)]

    found = [torch.cat(parts, 2) for parts in zip(*run_threads(ranks, rank), strict=True)]
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*whole)
    (out * weight).sum().backward()
    for mine, expected in zip(found, [out, *(x.grad for x in whole)], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


# -- slices and the loss -----------------------------------------------------------------------------------------------


def test_slices() -> None:
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    padding = torch.ones(2, SEQUENCE)
    given: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "attention_mask": padding, "names": ["a", "b"]}

    def rank(world: World) -> dict[str, Any]:
        mesh = npuzero.mesh(sequence=4, world=world)
        assert torch.equal(parallel.slice(tokens, mesh), tokens.chunk(4, 1)[world.rank])
        return parallel.slice(given, mesh)

    found = run_threads(4, rank)
    whole = {name: torch.cat([part[name] for part in found], 1) for name in ("input_ids", "labels", "position_ids")}
    assert torch.equal(whole["input_ids"], tokens)
    assert torch.equal(whole["labels"][:, :-1], tokens[:, 1:]) and whole["labels"][:, -1].tolist() == [-100, -100]
    assert torch.equal(whole["position_ids"], torch.arange(SEQUENCE).expand(2, -1))
    for part in found:
        assert part["attention_mask"] is padding and part["names"] == ["a", "b"] and "sequence_ids" not in part
    assert given.keys() == {"input_ids", "labels", "attention_mask", "names"} and torch.equal(given["labels"], tokens)


def test_packed_sequences_are_numbered() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])

    def rank(world: World) -> dict[str, Tensor]:
        mesh = npuzero.mesh(sequence=2, world=world)
        return parallel.slice({"input_ids": positions, "position_ids": positions}, mesh)

    for index, part in enumerate(run_threads(2, rank)):
        assert part["sequence_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8]
        assert torch.equal(part["position_ids"], positions.chunk(2, 1)[index])


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    """The mean of logits or of losses, on ranks with few labels or none."""
    draw = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(2, 8, 5, generator=draw), torch.randint(5, (2, 8), generator=draw)
    labels[0, :6] = labels[1, :4] = -100  # the first rank has no label, the second two

    def rank(world: World) -> list[Tensor]:
        mesh = npuzero.mesh(sequence=4, world=world)
        mine, own = parallel.slice(logits, mesh).clone().requires_grad_(), parallel.slice(labels, mesh)
        loss = parallel.token_loss(mine, own, mesh)
        loss.backward()
        losses = F.cross_entropy(mine.detach().transpose(1, 2), own.clamp(min=0), reduction="none")
        assert mine.grad is not None
        given = parallel.token_loss(losses, own, mesh, tokens=20)
        return [loss.detach(), mine.grad / 4, given]  # training averages over the ranks

    found = run_threads(4, rank)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    expected.backward()
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found], 1), whole.grad, rtol=1e-6, atol=1e-8)
    for loss, _, given in found:
        assert torch.equal(loss, found[0][0]) and loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert given.item() == pytest.approx(expected.item() * 6 / 20, rel=1e-6)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_every_rank() -> None:
    def rank(world: World) -> None:
        mesh = npuzero.mesh(sequence=4, world=world)
        q = torch.randn(1, 6, 4, 8)
        with pytest.raises(ConfigError, match=r"6 heads\. Choose sequence among 1, 2, 3, 6") as caught:
            parallel.attention(F.scaled_dot_product_attention, mesh)(q, q, q)
        assert caught.value.facts["divisors"] == [1, 2, 3, 6]
        with pytest.raises(ConfigError, match=r"\[2, 10\]\. Choose sequence among 1, 2, 5, 10, or pad to 12"):
            parallel.slice({"input_ids": torch.zeros(2, 10, dtype=torch.long)}, mesh)
        with pytest.raises(ConfigError, match=r"\[8\]\. Give whole sequences"):
            parallel.slice(torch.zeros(8), mesh)
        with pytest.raises(ConfigError, match="input_ids, inputs_embeds or labels"):
            parallel.slice({"x": q}, mesh)
        with pytest.raises(ConfigError, match=r"logits \[1, 4, 'classes'\] or losses \[1, 4\]"):
            parallel.token_loss(torch.zeros(1, 5, 3), torch.zeros(1, 4, dtype=torch.long), mesh)
        with pytest.raises(ConfigError, match=r"npuzero\.mesh"):
            parallel.slice(q, world)

    run_threads(4, rank)


def test_weight_ranks_without_a_sequence_axis_are_refused() -> None:
    def rank(world: World) -> None:
        for options in ({"world": world}, {"mesh": npuzero.mesh(world=world)}):
            with pytest.raises(ConfigError, match="a mesh with a sequence axis; got sequence=1 beside weights"):
                npuzero.zero(torch.nn.Linear(4, 4), plan="isp", local_size=2, **options)
        npuzero.zero(torch.nn.Linear(4, 4), plan="isp", local_size=1, world=world)

    run_threads(4, rank)
    with pytest.raises(ConfigError, match="a mesh with a sequence axis"):
        npuzero.predict(torch.nn.Linear(4, 4), "isp", MeshShape(2, 2))
    assert npuzero.predict(torch.nn.Linear(4, 4), "isp", 4, local_size=2).world == 4


def test_the_preset() -> None:
    plan = Plan.preset("isp", local_size=4)
    axes = {part: placement.axes for part, placement in plan.parts.items()}
    assert axes.pop("states") == ("local", "node") and set(axes.values()) == {("local",)}
    assert plan.mesh_shape(MeshShape(1, 8, pod=2, sequence=2)) == MeshShape(2, 4, pod=2, sequence=2)
    with pytest.raises(ConfigError, match="isp"):
        Plan.preset("isq")
