"""Activations that are equal on several ranks: each keeps a part, in memory, on the host, or in files."""

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
from npuzero.shard.offload.activation_storage import (
    PIECE_BYTES,
    ActivationStorage,
    FileActivationStorage,
    MemoryActivationStorage,
)
from npuzero.shard.step.activation_offload import ActivationOffload

from .test_activations import DIM, INPUT, MODELS, TOKENS, CheckpointedChain
from .toy import build_seeded_model

CPU = torch.device("cpu")


def chain_gradients(
    model: CheckpointedChain, around: ActivationOffload | None = None, tokens: int = TOKENS
) -> list[Tensor]:
    model.zero_grad()
    forward_chain(model, around, tokens).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def forward_chain(model: CheckpointedChain, around: ActivationOffload | None = None, tokens: int = TOKENS) -> Tensor:
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


def tensors_equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_keeps_its_part(ranks: int, make: type[CheckpointedChain]) -> None:
    want = chain_gradients(build_seeded_model(make=make))

    def rank(world: World) -> tuple[bool, int, int]:
        space, moved = DeviceSpace(CPU), Counter[str]()
        home = MemoryActivationStorage(space, CPU, moved, ("device>host", "host>device"))
        sharers = world.communicator(tuple(range(world.size)), "activations")
        model, around = build_seeded_model(make=make), ActivationOffload(home, CPU, sharers)
        around.leave(model.parameters())
        equal = [tensors_equal(chain_gradients(model, around), want) for _ in range(2)]
        assert moved["device>host"] == moved["host>device"]
        return all(equal), space.held["activations"], moved["device>host"]

    part = -(-INPUT // (512 * ranks)) * 512
    for equal, held, moved in comm.run_threads(ranks, rank):
        assert equal
        assert held == 2**20  # the least that is allocated
        assert moved == 2 * make.kept * part


def build_file_home(folder: Path, **options: bool) -> tuple[ActivationStorage, Counter[str], list[FileStore]]:
    moved, stores = Counter[str](), list[FileStore]()

    def open_store(nbytes: int) -> FileStore:
        stores.append(FileStore([folder], nbytes, **options))
        return stores[-1]

    buffers = [FileStore.aligned(PIECE_BYTES) for _ in range(2)]
    return FileActivationStorage(open_store, buffers, CPU, moved), moved, stores


@pytest.mark.parametrize("make", MODELS)
def test_in_a_file(tmp_path: Path, make: type[CheckpointedChain]) -> None:
    model = build_seeded_model(make=make)
    want = chain_gradients(model)
    home, moved, stores = build_file_home(tmp_path)
    around = ActivationOffload(home, CPU)
    around.leave(model.parameters())
    for _ in range(3):
        moved.clear()
        assert tensors_equal(chain_gradients(model, around), want)
        assert moved == dict.fromkeys(("device>host", "host>nvme", "nvme>host", "host>device"), make.kept * INPUT)
    assert len(stores) == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inputs_longer_than_the_buffers(tmp_path: Path) -> None:
    tokens = 3 * 2 * PIECE_BYTES // (4 * DIM) + 1
    model = build_seeded_model(make=CheckpointedChain)
    want = chain_gradients(model, tokens=tokens)
    around = ActivationOffload(build_file_home(tmp_path)[0], CPU)
    for _ in range(2):
        assert tensors_equal(chain_gradients(model, around, tokens), want)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_disk_that_fails_is_named_and_the_next_step_is_right(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_seeded_model(make=CheckpointedChain)
    want = chain_gradients(model)
    home, _, _ = build_file_home(tmp_path)
    around = ActivationOffload(home, CPU)
    assert tensors_equal(chain_gradients(model, around), want)
    break_store_call(verb, monkeypatch)
    with pytest.raises(StorageError, match="EIO"):
        chain_gradients(model, around)
    for _ in range(2):
        assert tensors_equal(chain_gradients(model, around), want)
    gone = weakref.ref(home)
    del home, around
    gc.collect()
    assert gone() is None


def test_what_could_not_be_stored_is_not_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = ActivationOffload(build_file_home(tmp_path)[0], CPU)
    loss = forward_chain(build_seeded_model(make=CheckpointedChain), around)
    break_store_call("read", monkeypatch)
    with pytest.raises(StorageError, match="EIO"):
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    break_store_call("write", monkeypatch, after=CheckpointedChain.kept - 1)  # the last, for which backward waits
    loss = forward_chain(build_seeded_model(make=CheckpointedChain), around)
    with pytest.raises(StorageError, match="EIO"):
        loss.backward(retain_graph=True)
    with pytest.raises(StateError, match="storing failed"):
        loss.backward(retain_graph=True)


def break_store_call(verb: str, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
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
    around = ActivationOffload(FileActivationStorage(full, buffers, CPU, Counter()), CPU)
    model = build_seeded_model(make=CheckpointedChain)
    with pytest.raises(OutOfSpace):
        chain_gradients(model, around)
