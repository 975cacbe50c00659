"""A Linear in tiles is, without ranks, the Linear that it was: what it computes, and what its state dict has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from npuzero import StateError
from npuzero.shard.layout.find_units import discover_units
from npuzero.shard.layout.tiled_linear import TiledLinear
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close


def two_layers() -> nn.Module:
    """Of 23 and 7 rows, one with a bias."""
    return nn.Sequential(nn.Linear(8, 23), nn.GELU(), nn.Linear(23, 7, bias=False))


def plain_and_tiled(tiles: dict[str, int]) -> tuple[Any, Any]:
    """The same model plain and in tiles."""
    return build_seeded_model(make=two_layers), npuzero.tiled(build_seeded_model(make=two_layers), tiles)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_it_computes_what_the_linear_does(count: int) -> None:
    plain, tiled = plain_and_tiled({"*": count})
    inputs = [torch.randn(3, 5, 8).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    found = [model(x) for model, x in zip((plain, tiled), inputs, strict=True)]
    for output in found:
        output.square().sum().backward()
    gradients = [{"output": out.detach(), "input": x.grad} for out, x in zip(found, inputs, strict=True)]
    for name, parameter in plain.named_parameters():
        layer, kind = name.split(".")
        tiles = getattr(tiled[int(layer)], "tiles", None)
        whole = parameter.grad if tiles is None else torch.cat([getattr(tile, kind).grad for tile in tiles])
        gradients[0][name], gradients[1][name] = parameter.grad, whole
    assert_states_close(gradients[1], gradients[0])


def test_tiles_have_all_rows_in_equal_parts_and_take_no_memory_of_their_own() -> None:
    plain = build_seeded_model(make=two_layers)
    weight = plain[0].weight
    npuzero.tiled(plain, {"0": 5})
    assert [tuple(tile.weight.shape) for tile in plain[0].tiles] == [(5, 8)] * 3 + [(4, 8)] * 2
    assert {tile.weight.untyped_storage().data_ptr() for tile in plain[0].tiles} == {weight.data_ptr()}
    assert torch.equal(torch.cat([tile.weight for tile in plain[0].tiles]), weight)


def test_the_layer_shows_one_weight_without_values() -> None:
    _, tiled = plain_and_tiled({"0": 3})
    layer = tiled[0]
    assert isinstance(layer, TiledLinear) and isinstance(layer.weight, nn.Parameter)
    assert layer.weight.shape == (23, 8) and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
    assert layer.bias.shape == (23,) and "in_features=8, out_features=23, bias=True" in repr(layer)
    tiled.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    for read in (lambda: layer.weight + 1, lambda: layer.weight.sum(), lambda: nn.init.zeros_(layer.weight)):
        with pytest.raises(StateError, match="one piece"):
            read()


def test_what_was_noted_on_the_layer_and_its_weight_stays() -> None:
    plain = build_seeded_model(make=two_layers)
    called = []
    plain[0].register_forward_hook(lambda *_: called.append(1))
    plain[0].weight.no_decay = True
    plain[0].bias.requires_grad_(False)
    npuzero.tiled(plain.eval(), {"0": 2})
    plain(torch.randn(1, 8))
    assert called == [1]
    for tile in plain[0].tiles:
        assert tile.weight.no_decay and tile.weight.requires_grad and not tile.bias.requires_grad and not tile.training


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_go_both_ways(assign: bool) -> None:
    """From a plain model into tiles, into other tiles, and back."""
    plain, first = plain_and_tiled({"*": 3})
    second = npuzero.tiled(build_seeded_model(1, two_layers), {"0": 5, "2": 7})
    assert_same_bits(first.state_dict(), plain.state_dict())
    second.load_state_dict(first.state_dict(), assign=assign)
    back = build_seeded_model(2, two_layers)
    back.load_state_dict(copy.deepcopy(second).state_dict(), assign=assign)
    assert_same_bits(back.state_dict(), plain.state_dict())


def test_a_state_dict_that_does_not_fit_is_refused_by_the_names_of_the_whole() -> None:
    _, tiled = plain_and_tiled({"0": 3})
    state = {"0.weight": torch.zeros(3, 8), "0.tiles.1.weight": torch.zeros(8, 8), "2.weight": torch.zeros(7, 23)}
    with pytest.raises(RuntimeError) as caught:
        tiled.load_state_dict(state)
    text = str(caught.value)
    assert "size mismatch for 0.weight" in text and 'Missing key(s) in state_dict: "0.bias"' in text
    assert 'Unexpected key(s) in state_dict: "0.tiles.1.weight"' in text


def test_tiles_are_units_of_their_own_whatever_the_rule() -> None:
    names = [f"blocks.1.qkv.tiles.{i}" for i in range(3)]
    for rule in (None, lambda name, _: name == "blocks.1"):
        specs = discover_units(npuzero.tiled(build_seeded_model(), {"blocks.1.qkv": 3}), rule)
        order = [spec.name for spec in specs]
        assert order[order.index("blocks.1") + 1 :][:3] == names
        owned = {spec.name: [name for name, _ in spec.parameters] for spec in specs}
        assert owned[names[0]] == [f"{names[0]}.weight"] and "blocks.1.qkv.weight" not in owned["blocks.1"]


def test_a_pattern_names_many() -> None:
    model = npuzero.tiled(build_seeded_model(), {"blocks.*.mlp.?": 2, "blocks.0.out": 3})
    assert sum(isinstance(module, TiledLinear) for module in model.modules()) == 3 * 2 + 1
