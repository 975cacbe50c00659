"""The update in chunks: no bit of any result changes, and finished chunks go to peers during the update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npuzero
from npuzero import Precision, Settings, comm, observe, ops
from npuzero.comm import World
from npuzero.observe import Events, Instant, Span
from world.test_optimizers import optimizer_state
from world.toy import ToyGPT, build_seeded_model, toy_loss, toy_tokens
from world.train import Session, State, assert_same_bits, run_cut

#: Of a chunk: within a flat, and across flats.
CHUNKS = (3000, 20000)
QUICK = ("zero1", "8 bits"), ("zero3", "drawn"), ("hsdp", "fp32")
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "split": Precision(torch.bfloat16, masters="split", moments="bf16"),
    "8 bits": Precision(torch.bfloat16, masters="split", moments="int8"),
    "drawn": Precision(torch.bfloat16, masters="none", moments="int8"),
}


def train_chunked(session: Session) -> State:
    """Groups, clipping, parameters without a gradient in some steps, and an overflow that only the device knows of."""
    odd, even = list(session.model.parameters())[::2], list(session.model.parameters())[1::2]
    groups = [{"params": odd}, {"params": even, "weight_decay": 0.0, "betas": (0.8, 0.99)}]
    optimizer = session.optimizer(torch.optim.AdamW, groups, lr=1e-2, amsgrad=True)
    scaler = session.scaler(init_scale=2.0**10)
    for step in range(4):
        factor = torch.inf if step == 2 else 1.0
        scaler.scale(session.loss(step) * factor).backward()
        if step == 1:
            even[3].grad = None
        scaler.unscale_(optimizer)
        if step != 2:
            session.clip(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer_state(optimizer)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        pytest.param(plan, precision, marks=() if (plan, precision) in QUICK else pytest.mark.slow)
        for plan in ("zero1", "zero3", "hsdp")
        for precision in PRECISIONS
    ],
)
def test_chunks_move_no_bit(plan: str, precision: str) -> None:
    options: dict[str, Any] = {"plan": plan, "local_size": 2, "precision": PRECISIONS[precision]}
    whole = run_cut(train_chunked, 4, ToyGPT, **options)
    for chunk_bytes in CHUNKS:
        chunked = run_cut(train_chunked, 4, ToyGPT, settings=Settings(chunk_bytes=chunk_bytes), **options)
        for found, expected in zip(chunked, whole, strict=True):
            assert_same_bits(found, expected)


def chunk_events(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """Record rank 0's step in order: each "launch", and R4 of each unit as it ends."""
    update = ops.AdamLine.update

    def launched(*arguments: Any) -> None:
        observe.instant("update", "launch")
        update(*arguments)

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero1", world=world, settings=Settings(**settings))
        optimizer = npuzero.AdamW(model.parameters())
        toy_loss(model, toy_tokens(0, 0, world.rank)).backward()
        optimizer.step()

    monkeypatch.setattr(ops.AdamLine, "update", launched)
    with observe.recording(Events()) as sink:
        comm.run_threads(2, rank)
    names = [event.name for event in sink.events if isinstance(event, (Span, Instant)) and event.rank == 0]
    return [name for name in names if name == "launch" or name.startswith("restore")]


def test_one_launch_and_then_the_units_unless_there_are_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    order = chunk_events(monkeypatch, overlap=False)
    assert order.count("launch") == 1
    assert order[0] == "launch"


def test_a_unit_is_restored_when_its_last_chunk_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of forward, and as often as in one chunk."""
    whole = chunk_events(monkeypatch, overlap=False)
    order = chunk_events(monkeypatch, overlap=False, chunk_bytes=4096)
    assert [name for name in order if name != "launch"] == [name for name in whole if name != "launch"]
    first, last = (next(i for i, name in enumerate(some) if name != "launch") for some in (order, order[::-1]))
    assert first > 1, "the root unit is larger than a chunk"
    assert last == 0, "after the last launch its unit"
    between = order[first:]
    assert "launch" in between and between.index("launch") < len(between) - 1
