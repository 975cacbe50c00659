"""Which modules become units, and who owns a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from npuzero.errors import ConfigError
from npuzero.shard.layout.find_units import ROOT, discover_units, find_root_callers


class TwoLinearBlock(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(dim, dim)
        self.b = nn.Linear(dim, dim)


class BlockStack(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = blocks
        self.head = nn.Linear(4, 5, bias=False)


def owned_parameter_names(model: nn.Module, rule=None) -> dict[str, list[str]]:
    specs = discover_units(model, rule)
    assert specs[0].name == ROOT and specs[0].module is model
    names = [name for spec in specs for name, _ in spec.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters()), "each parameter once"
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is p for spec in specs for name, p in spec.parameters)
    return {spec.name: [name for name, _ in spec.parameters] for spec in specs}


def two_linear_blocks(count: int = 3) -> list[nn.Module]:
    return [TwoLinearBlock() for _ in range(count)]


@pytest.mark.parametrize(
    "make",
    [nn.ModuleList, lambda b: nn.Sequential(*b), lambda b: nn.ModuleDict({str(i): m for i, m in enumerate(b)})],
    ids=["ModuleList", "Sequential", "ModuleDict"],
)
def test_repeated_blocks_are_units(make) -> None:
    found = owned_parameter_names(BlockStack(make(two_linear_blocks())))
    assert list(found) == [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    assert found[ROOT] == ["embed.weight", "head.weight"]
    assert found["blocks.1"] == [f"blocks.1.{leaf}" for leaf in ("a.weight", "a.bias", "b.weight", "b.bias")]


def test_the_outermost_list_counts() -> None:
    inner = [nn.Sequential(TwoLinearBlock(), TwoLinearBlock()), nn.Sequential(TwoLinearBlock(), TwoLinearBlock())]
    assert list(owned_parameter_names(BlockStack(nn.ModuleList(inner)))) == [ROOT, "blocks.0", "blocks.1"]


def test_in_a_list_of_lists_the_blocks_are_units() -> None:
    """A ModuleList's own forward is never called, so it can be no unit."""
    nested = nn.ModuleList(nn.ModuleList(two_linear_blocks(2)) for _ in range(2))
    assert list(owned_parameter_names(BlockStack(nested))) == [
        ROOT,
        *(f"blocks.{i}.{j}" for i in range(2) for j in range(2)),
    ]


def test_two_stacks_in_one_model() -> None:
    model = nn.Module()
    model.encoder, model.decoder = (
        BlockStack(nn.ModuleList(two_linear_blocks(2))),
        BlockStack(nn.ModuleList(two_linear_blocks(2))),
    )
    assert list(owned_parameter_names(model)) == [
        ROOT,
        *(f"{part}.blocks.{i}" for part in ("encoder", "decoder") for i in range(2)),
    ]


def test_what_does_not_repeat_is_the_roots() -> None:
    assert list(owned_parameter_names(BlockStack(nn.ModuleList([TwoLinearBlock()])))) == [ROOT]
    assert list(owned_parameter_names(TwoLinearBlock())) == [ROOT]
    assert owned_parameter_names(nn.Identity()) == {ROOT: []}
    # One class twice, but only one of them has parameters.
    assert list(owned_parameter_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()))) == [ROOT]


def test_activations_between_blocks_are_no_units() -> None:
    assert list(owned_parameter_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == [ROOT, "0", "2"]


def test_a_parameter_tied_across_units_belongs_to_what_is_around_both() -> None:
    model = BlockStack(nn.ModuleList(two_linear_blocks()))
    model.blocks[2].a.weight = model.blocks[0].a.weight
    found = owned_parameter_names(model)
    assert found[ROOT] == ["embed.weight", "blocks.0.a.weight", "head.weight"]
    assert "blocks.2.a.weight" not in found["blocks.2"] and len(found["blocks.0"]) == 3

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(BlockStack(nn.ModuleList(two_linear_blocks(2))) for _ in range(2))

    nested = Outer()
    nested.stages[1].blocks[1].b.bias = nested.stages[1].blocks[0].b.bias
    found = owned_parameter_names(nested, (BlockStack, TwoLinearBlock))
    assert "stages.1.blocks.0.b.bias" in found["stages.1"], "the innermost unit around both, not the root"


def test_a_parameter_tied_within_a_unit_stays_there_once() -> None:
    model = BlockStack(nn.ModuleList(two_linear_blocks()))
    model.blocks[1].b.weight = model.blocks[1].a.weight
    assert owned_parameter_names(model)["blocks.1"] == ["blocks.1.a.weight", "blocks.1.a.bias", "blocks.1.b.bias"]


def test_a_head_tied_to_the_embedding_is_the_roots() -> None:
    model = BlockStack(nn.ModuleList(two_linear_blocks()))
    model.head.weight = model.embed.weight
    assert owned_parameter_names(model)[ROOT] == ["embed.weight"]


def test_a_unit_left_without_parameters_is_none() -> None:
    block = TwoLinearBlock()
    assert list(owned_parameter_names(BlockStack(nn.ModuleList([block, block])))) == [ROOT]
    frozen = BlockStack(nn.ModuleList(two_linear_blocks()))
    frozen.blocks[1].requires_grad_(False)
    assert "blocks.1" in owned_parameter_names(frozen), "frozen parameters are cut too"


def test_rules() -> None:
    model = BlockStack(nn.ModuleList(two_linear_blocks(2)))
    by_class = owned_parameter_names(model, TwoLinearBlock)
    assert list(by_class) == [ROOT, "blocks.0", "blocks.1"]
    assert list(owned_parameter_names(model, (TwoLinearBlock, nn.Embedding))) == [ROOT, "embed", "blocks.0", "blocks.1"]
    assert list(owned_parameter_names(model, lambda name, module: name.endswith("1.a"))) == [ROOT, "blocks.1.a"]
    nested = owned_parameter_names(model, (TwoLinearBlock, nn.Linear))
    assert list(nested) == [ROOT, *(f"blocks.{i}.{leaf}" for i in range(2) for leaf in "ab"), "head"]
    with_rest = BlockStack(nn.ModuleList(two_linear_blocks(2)))
    with_rest.blocks[0].scale = nn.Parameter(torch.ones(2))
    assert owned_parameter_names(with_rest, (TwoLinearBlock, nn.Linear))["blocks.0"] == ["blocks.0.scale"], (
        "the innermost unit owns it"
    )


@pytest.mark.parametrize(
    "rule",
    [nn.Conv2d, (nn.Conv2d, nn.GRU), lambda name, module: False, int, (TwoLinearBlock, "b"), 3, "Block", nn.ModuleList],
)
def test_a_rule_that_cannot_be_kept_is_an_error(rule) -> None:
    with pytest.raises(ConfigError, match="units"):
        discover_units(BlockStack(nn.ModuleList(two_linear_blocks())), rule)


def test_doors_are_what_reaches_the_roots_parameters() -> None:
    model = BlockStack(nn.ModuleList(two_linear_blocks()))
    model.body = nn.Sequential(model.embed)
    model.blocks[2].a.weight = model.blocks[0].b.weight  # tied: the root's
    found = {
        name for name, module in model.named_modules() if module in find_root_callers(model, discover_units(model)[0])
    }
    assert found == {"embed", "body", "head", "blocks", "blocks.0", "blocks.0.b", "blocks.2", "blocks.2.a"}
