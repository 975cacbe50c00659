"""Activations that ranks hold alike, of which each keeps its part: in memory, on the host, or in files."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from npuzero import comm
from npuzero.comm import World
from npuzero.errors import OutOfSpace, StateError, StorageError
from npuzero.memory import DeviceSpace, FileStore
from npuzero.shard.activations import Activations
from npuzero.shard.homes import PIECE_BYTES, FileHome, Home, SpaceHome

from .test_activations import DIM, INPUT, MODELS, TOKENS, Chain
from .toy import build

CPU = torch.device("cpu")


def gradients(model: Chain, around: Activations | None = None, tokens: int = TOKENS) -> list[Tensor]:
    model.zero_grad()
    forward(model, around, tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def forward(model: Chain, around: Activations | None = None, tokens: int = TOKENS) -> Tensor:
    x = torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(0))
    visit = around and around.visit()
    if visit:
        visit.before(model, (), {})
    try:
        loss: Tensor = model(x)
    finally:
        if visit:
            visit.failed()
    return loss


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_keeps_its_part(ranks: int, make: type[Chain]) -> None:
    want = gradients(build(make=make))

    def rank(world: World) -> tuple[bool, int, int]:
        space, moved = DeviceSpace(CPU), Counter[str]()
        home = SpaceHome(space, CPU, moved, ("device>host", "host>device"))
        sharers = world.communicator(tuple(range(world.size)), "activations")
        model, around = build(make=make), Activations(home, CPU, sharers)
        around.leave(model.parameters())
        equal = [same(gradients(model, around), want) for _ in range(2)]
        assert moved["device>host"] == moved["host>device"]
        return all(equal), space.held["activations"], moved["device>host"]

    part = -(-INPUT // (512 * ranks)) * 512
    for equal, held, moved in comm.run_threads(ranks, rank):
        assert equal
        assert held == 2**20  # the least that is allocated
        assert moved == 2 * make.kept * part


def stored(folder: Path, **options: bool) -> tuple[Home, Counter[str], list[FileStore]]:
    moved, stores = Counter[str](), list[FileStore]()

    def open_store(nbytes: int) -> FileStore:
        stores.append(FileStore([folder], nbytes, **options))
        return stores[-1]

    buffers = [FileStore.aligned(PIECE_BYTES) for _ in range(2)]
    return FileHome(open_store, buffers, CPU, moved), moved, stores


@pytest.mark.parametrize("make", MODELS)
def test_in_a_file(tmp_path: Path, make: type[Chain]) -> None:
    model = build(make=make)
    want = gradients(model)
    home, moved, stores = stored(tmp_path)
    around = Activations(home, CPU)
    around.leave(model.parameters())
    for _ in range(3):
        moved.clear()
        assert same(gradients(model, around), want)
        assert moved == dict.fromkeys(("device>host", "host>nvme", "nvme>host", "host>device"), make.kept * INPUT)
    assert len(stores) == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inputs_longer_than_the_buffers(tmp_path: Path) -> None:
    tokens = 3 * 2 * PIECE_BYTES // (4 * DIM) + 1
    model = build(make=Chain)
    want = gradients(model, tokens=tokens)
    around = Activations(stored(tmp_path)[0], CPU)
    for _ in range(2):
        assert same(gradients(model, around, tokens), want)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_disk_that_fails_is_named_and_the_next_step_is_right(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(make=Chain)
    want = gradients(model)
    home, _, _ = stored(tmp_path)
    around = Activations(home, CPU)
    assert same(gradients(model, around), want)
    strike(verb, monkeypatch)
    with pytest.raises(StorageError, match="EIO"):
        gradients(model, around)
    for _ in range(2):
        assert same(gradients(model, around), want)
    gone = weakref.ref(home)
    del home, around
    gc.collect()
    assert gone() is None


def test_what_could_not_be_stored_is_not_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Activations(stored(tmp_path)[0], CPU)
    loss = forward(build(make=Chain), around)
    strike("read", monkeypatch)
    with pytest.raises(StorageError, match="EIO"):
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    strike("write", monkeypatch, after=Chain.kept - 1)  # the last, for which backward waits
    loss = forward(build(make=Chain), around)
    with pytest.raises(StorageError, match="EIO"):
        loss.backward(retain_graph=True)
    with pytest.raises(StateError, match="storing failed"):
        loss.backward(retain_graph=True)


def strike(verb: str, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """Have one call of a store's ``verb`` raise."""
    plain: Callable[..., object] = getattr(FileStore, verb)
    calls = itertools.count()

    def broken(*args: object) -> object:
        if next(calls) < after:
            return plain(*args)
        monkeypatch.setattr(FileStore, verb, plain)
        raise StorageError("a test's disk", expected="success", got="EIO", do="Look at the disk.")

    monkeypatch.setattr(FileStore, verb, broken)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def full(nbytes: int) -> FileStore:
        raise OutOfSpace("folder", expected=f"{nbytes} bytes", got="0", do="Make room.")

    buffers = [FileStore.aligned(PIECE_BYTES) for _ in range(2)]
    around = Activations(FileHome(full, buffers, CPU, Counter()), CPU)
    model = build(make=Chain)
    with pytest.raises(OutOfSpace):
        gradients(model, around)
