"""Thin wires as data: what a precision may say of them, the levels of a sum, the bytes of a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npuzero import ConfigError, Plan, Precision, _native
from npuzero.plan import (
    THINNED,
    FlatSize,
    MeshShape,
    StepSpec,
    WireLevel,
    levels_beyond,
    levels_of,
    predict_bytes,
    thin_message_bytes,
)
from npuzero.plan.table.wire import BLOCKS, MESSAGE_LINE

BF16 = torch.bfloat16
SHAPE = MeshShape(2, 4)


@pytest.mark.parametrize("bits", BLOCKS)
@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 8, 255, 4097])
def test_a_message_has_the_bytes_that_kernels_write(bits: int, blocks: int) -> None:
    numel = blocks * BLOCKS[bits]
    found = thin_message_bytes(numel, bits)
    assert found == _native._C.message_bytes(numel, bits)
    assert found % MESSAGE_LINE == 0 and 0 <= found - numel * bits // 8 - 2 * blocks < MESSAGE_LINE


def test_a_precision_says_how_gradients_travel_along_each_axis() -> None:
    by_axis = Precision(BF16, wires={"node": "int4", "local": BF16}, feedback="node")
    assert by_axis.level_of("node") == WireLevel(("node",), 4, True)
    assert by_axis.level_of("local") == WireLevel(("local",))
    assert by_axis.wire_of(BF16) is BF16 and by_axis.shard_elements == 128
    everywhere = Precision(torch.float32, wires="int8", gathers="int8", feedback="all")
    assert [everywhere.level_of(axis).bits for axis in ("pod", "node", "local", "tensor")] == [8, 8, 8, None]
    assert everywhere.level_of("local").feedback and everywhere.wire_of(torch.float32) is torch.float32
    assert everywhere.shard_elements == 256 and everywhere.thin and by_axis.thin
    assert not Precision(BF16, wires={"node": BF16}).thin and Precision(BF16).shard_elements == 1


def test_equal_wires_are_equal_precisions_however_they_are_said() -> None:
    said: list[Any] = [
        {"node": "int4", "local": BF16},
        {"local": BF16, "node": "int4", "pod": None},
        (("local", BF16), ("node", "int4")),
    ]
    assert len({Precision(BF16, wires=wires) for wires in said}) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wires": "int3"}, ["precision.wires", "int4", "int8"]),
        ({"wires": {"node": "int16"}}, ["wires['node']", "int8"]),
        ({"wires": {"nodes": "int4"}}, ["wires", "pod, node, local", "'node'"]),
        ({"wires": {"tensor": "int4"}}, ["wires", "pod, node, local", "tensor"]),
        ({"wires": ("int4", "int4")}, ["wires", "pod, node, local"]),
        ({"wires": {"node": torch.float32, "local": BF16}}, ["wires", "one dtype"]),
        ({"wires": {"node": "int4", "local": torch.float16}}, ["wires", "float16 parameters"]),
        ({"gathers": "int4"}, ["gathers", "int8"]),
        ({"gathers": torch.int8}, ["gathers", "int8"]),
        ({"feedback": "node"}, ["feedback", "int4"]),
        ({"feedback": "node", "wires": {"local": "int4"}}, ["feedback", "along 'node'"]),
        ({"feedback": "all", "wires": BF16}, ["feedback", "int4"]),
        ({"feedback": "local", "wires": "int4"}, ["feedback", "node, all"]),
        ({"feedback": True, "wires": "int4"}, ["feedback", "node, all"]),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Precision(BF16, **options)
    assert all(word in str(raised.value) for word in words), raised.value


def test_levels_follow_the_placement() -> None:
    def levels(axes: tuple[str, ...], **wires: Any) -> list[tuple[tuple[str, ...], int | None]]:
        found = levels_of(Precision(BF16, wires=wires or None), axes, SHAPE.size)
        return [(level.axes, level.bits) for level in found]

    both = ("local", "node")
    assert levels(both) == [(both, None)]
    assert levels(both, node="int4") == [(("local",), None), (("node",), 4)]
    assert levels(both[::-1], node="int4") == [(("node",), 4), (("local",), None)]
    assert levels(both, node="int4", local="int8") == [(("local",), 8), (("node",), 4)]
    assert levels(("pod", "local"), pod="int4") == [(("pod", "local"), None)]  # a pod is one rank here
    assert levels(("node", "local", "tensor"), node="int8") == [(("node",), 8), (("local",), None)]
    assert levels(()) == levels(("pod",)) == []
    precision = Precision(BF16, wires={"node": "int4"})
    assert [level.axes for level in levels_beyond(precision, both[::-1], SHAPE.size)] == [("local",), ("node",)]
    assert [level.axes for level in levels_beyond(Precision(BF16), both[::-1], SHAPE.size)] == [both[::-1]]


@pytest.mark.parametrize("name", THINNED)
def test_thin_presets_have_hpzs_placements(name: str) -> None:
    plan, row = Plan.preset(name, precision="bf16", local_size=4), Plan.preset("hpz", precision="bf16", local_size=4)
    assert plan.parts == row.parts and plan.name == name and plan.local_size == 4
    assert plan.precision.gathers == "int8" and plan.precision.level_of("node").bits == 4
    assert plan.precision.level_of("local").bits == (4 if name == "zero++" else None)
    in_fp32 = Plan.preset(name, precision=Precision(BF16, wires=torch.float32)).precision
    assert in_fp32.wire_of(BF16) is torch.float32 and in_fp32.level_of("node").bits == 4
    own = Precision(BF16, wires={"node": "int8"}, feedback="node")
    assert Plan.preset(name, precision=own).precision == Precision(
        BF16, wires={"node": "int8"}, feedback="node", gathers="int8"
    )


def test_bytes_between_nodes_at_2_times_4() -> None:
    """Of a model of ψ elements in bf16, a rank sends so many ψ bytes to other nodes: ZeRO++'s table, and ours."""
    numel = 2**26
    found = {}
    for name in ("zero3", "hpz", *THINNED):
        plan = Plan.preset(name, precision="bf16", local_size=4)
        along = predict_bytes(plan, [FlatSize(0, numel, BF16)], SHAPE, StepSpec(1)).sent_along
        found[name] = sum(along["node"].values()) / numel
    assert found == pytest.approx({"zero3": 3.0, "hpz": 0.5, "zero++": 0.190, "thin": 0.190}, abs=5e-4)


def test_what_rounding_loses_is_held_with_the_states() -> None:
    numel = 8 * 1024
    for feedback, kept in ((None, 0), ("node", numel // 4), ("all", numel + numel // 4)):
        precision = Precision(BF16, wires="int4", feedback=feedback)
        plan = Plan.preset("hpz", precision=precision, local_size=4)
        held = predict_bytes(plan, [FlatSize(0, numel, BF16)], SHAPE, StepSpec(1)).bytes_held
        assert held["states"] == numel // 8 * 12 + 4 * kept
