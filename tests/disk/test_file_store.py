"""Bytes in files without names: all come back, whatever the order, the folders and the faults of the system."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disk.programs import build_cpp_program
from npuzero import _native
from npuzero.errors import ConfigError, ContractError, OutOfSpace, StateError, StorageError
from npuzero.memory.file import BLOCK, FileStore

MIB = 1 << 20
HERE = Path(__file__).parent
Call = _native.io.Call
inject = _native.io.inject


@pytest.fixture(autouse=True)
def _whole() -> Iterator[None]:
    yield
    _native.io.heal()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if _native.io.is_memory(str(tmp_path)):
        pytest.skip("the temporary folder is in memory")
    return tmp_path


def random_file_buffer(nbytes: int, seed: int = 0) -> Tensor:
    buffer = FileStore.aligned(nbytes)
    generator = torch.Generator().manual_seed(seed)
    buffer.view(torch.int64).random_(generator=generator)
    return buffer


def read_back(store: FileStore, offset: int, nbytes: int) -> Tensor:
    buffer = store.aligned(nbytes)
    store.read(offset, buffer).wait()
    return buffer


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("folders", [1, 2, 3])
def test_bytes_come_back(folder, folders, verify):
    places = [folder / str(index) for index in range(folders)]
    for place in places:
        place.mkdir()
    nbytes = 11 * MIB + 3 * BLOCK
    store, image, draw = (
        FileStore(places, nbytes, verify=verify),
        torch.zeros(nbytes, dtype=torch.uint8),
        random.Random(1),
    )
    assert read_back(store, 0, nbytes).eq(0).all(), "zeros at first"
    written = 0
    for seed in range(12):  # extents that overlap, begin and end anywhere
        first = draw.randrange(nbytes // BLOCK)
        blocks = draw.randrange(1, nbytes // BLOCK - first + 1)
        data = random_file_buffer(blocks * BLOCK, seed)
        store.write(first * BLOCK, data).wait()
        image[first * BLOCK :][: data.numel()] = data
        written += data.numel()
        first = draw.randrange(nbytes // BLOCK)
        part = read_back(store, first * BLOCK, nbytes - first * BLOCK)
        assert torch.equal(part, image[first * BLOCK :])
    assert store.moved["write"] == written
    assert all(not os.listdir(place) for place in places), "a file with a name"


def test_many_requests_at_once(folder):
    count, nbytes = 24, 768 * 1024
    store = FileStore([folder, folder], count * nbytes, threads=2)
    buffers = [random_file_buffer(nbytes, seed) for seed in range(count)]

    def use(mine: range) -> None:
        for handle in [store.write(index * nbytes, buffers[index]) for index in mine]:
            handle.wait()
        backs = [store.aligned(nbytes) for _ in mine]
        handles = [store.read(index * nbytes, back) for index, back in zip(mine, backs, strict=True)]
        good.extend(index for index, back, handle in zip(mine, backs, handles, strict=True)
                    if handle.wait() is None and handle.done() and torch.equal(back, buffers[index]))  # fmt: skip

    good: list[int] = []
    users = [threading.Thread(target=use, args=(range(first, count, 4),)) for first in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert sorted(good) == list(range(count))
    assert store.moved == {"read": count * nbytes, "write": count * nbytes}


def test_stores_in_one_folder_are_apart(folder):
    stores = [FileStore([folder], MIB) for _ in range(2)]
    for seed, store in enumerate(stores):
        store.write(0, random_file_buffer(MIB, seed)).wait()
    for seed, store in enumerate(stores):
        assert torch.equal(read_back(store, 0, MIB), random_file_buffer(MIB, seed))


def test_a_request_of_nothing(folder):
    store = FileStore([folder], 0)
    handle = store.write(0, store.aligned(0))
    assert handle.done()
    handle.wait()


def test_buffers_have_pages_of_their_own():
    buffers = [FileStore.aligned(nbytes) for nbytes in (1, BLOCK, 5 * MIB)]
    assert all(buffer.data_ptr() % BLOCK == 0 and buffer.eq(0).all() for buffer in buffers)
    assert [buffer.numel() for buffer in buffers] == [1, BLOCK, 5 * MIB]


def _io_counts() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the system does not count")
def test_the_disk_moves_what_was_asked_for_and_no_more(folder):
    nbytes = 9 * MIB + BLOCK
    store = FileStore([folder], nbytes)
    if not store.direct:
        pytest.skip("no O_DIRECT here")
    data, back = random_file_buffer(nbytes), store.aligned(nbytes)
    store.write(0, data).wait()
    seen = set()
    for _ in range(5):  # whatever else this process reads from its disks is counted, too
        before = _io_counts()
        store.write(0, data).wait()
        store.read(0, back).wait()
        after = _io_counts()
        seen.add(tuple(after[key] - before[key] for key in ("read_bytes", "write_bytes")))
    assert (nbytes, nbytes) in seen, seen


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "make"),
    [
        (1, lambda: random_file_buffer(BLOCK)),
        (-BLOCK, lambda: random_file_buffer(BLOCK)),
        (MIB, lambda: random_file_buffer(BLOCK)),
        (0, lambda: random_file_buffer(MIB + BLOCK)),
        (0, lambda: random_file_buffer(2 * BLOCK)[: BLOCK + 512]),
        (0, lambda: random_file_buffer(3 * BLOCK)[512 : 512 + BLOCK]),
        (0, lambda: random_file_buffer(BLOCK).view(torch.float32)),
        (0, lambda: random_file_buffer(2 * BLOCK)[::2]),
        (0, lambda: torch.empty(BLOCK, dtype=torch.uint8, device="meta")),
    ],
)
def test_a_request_that_does_not_fit(folder, offset, make):
    store = FileStore([folder], MIB)
    for verb in (store.read, store.write):
        with pytest.raises(ContractError, match=r"FileStore.aligned"):
            verb(offset, make())
    assert store.moved == {"read": 0, "write": 0}


def test_a_closed_store(folder):
    store = FileStore([folder], MIB)
    data = random_file_buffer(MIB)
    handle = store.write(0, data)
    store.close()
    store.close()
    assert handle.done()
    handle.wait()
    with pytest.raises(StateError, match="closed"):
        store.read(0, data)


def test_folders_that_cannot_be(folder, monkeypatch):
    (folder / "file").touch()
    for wrong in (folder / "none", folder / "file"):
        with pytest.raises(ConfigError, match=wrong.name) as met:
            FileStore([folder, wrong], MIB)
        assert "local disk" in met.value.do
    with pytest.raises(ConfigError, match="nvme_paths"):
        FileStore([], MIB)
    inject(Call.nameless, error=errno.EACCES)
    with pytest.raises(ConfigError, match=f"{folder}.*Permission denied"):
        FileStore([folder], MIB)


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or not _native.io.is_memory("/dev/shm"), reason="no tmpfs")
def test_a_folder_in_memory():
    with pytest.raises(ConfigError, match="tmpfs"):
        FileStore([Path("/dev/shm")], MIB)


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_a_disk_that_is_too_small(folder, count):
    free = shutil.disk_usage(folder).free
    begin = time.monotonic()
    with pytest.raises(OutOfSpace, match="bytes free") as met:
        FileStore([folder] * count, free + (1 << 40))  # in two folders: half of it would fit into none of them either
    assert time.monotonic() - begin < 5
    assert met.value.facts["needed"] >= free + (1 << 40) and met.value.facts["free"] <= free + (1 << 34)
    assert met.value.facts["folder"] == str(folder)
    assert not os.listdir(folder)


def test_a_disk_that_fills_up_meanwhile(folder):
    inject(Call.allocate, error=errno.ENOSPC)
    with pytest.raises(OutOfSpace, match="No space left"):
        FileStore([folder], MIB)
    FileStore([folder], MIB).close()


def test_a_disk_that_fills_up_later(folder):
    store = FileStore([folder], MIB)
    inject(Call.write, error=errno.ENOSPC)
    with pytest.raises(OutOfSpace, match=f"{folder}.*No space left.*offset 0") as met:
        store.write(0, random_file_buffer(MIB)).wait()
    assert met.value.facts["free"] > 0


# --- faults in mid-run ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["direct", "cached"])
def store(request: Any, folder: Path) -> Iterator[FileStore]:
    """With 5 MiB in two folders, past the page cache and through it."""
    if request.param == "cached":
        inject(Call.direct, times=2, error=errno.EINVAL)
    store = FileStore([folder, folder], 5 * MIB)
    if request.param == "direct" and not store.direct:
        pytest.skip("no O_DIRECT here")
    assert store.direct is (request.param == "direct"), "it says so"
    yield store
    store.close()


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_bad_sector(store, folder, verb, after):
    data = random_file_buffer(5 * MIB)
    store.write(0, data).wait()
    inject(getattr(Call, verb), after=after, error=errno.EIO)
    handle = getattr(store, verb)(0, data)
    for _ in range(2):  # as often as it is asked
        with pytest.raises(StorageError, match=f"{verb} in {folder} at offset .*Input/output error.*checkpoint") as met:
            handle.wait()
    assert handle.done()
    assert met.value.facts["errno"] == errno.EIO and met.value.facts["folder"] == str(folder)
    assert isinstance(met.value, OSError)
    store.write(0, data).wait()  # the store itself goes on
    assert torch.equal(read_back(store, 0, 5 * MIB), data)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_end_of_a_file_that_was_longer(store, verb):
    inject(getattr(Call, verb), most=0)
    with pytest.raises(StorageError, match="end of the file"):
        getattr(store, verb)(0, random_file_buffer(5 * MIB)).wait()


def test_short_transfers_are_gone_on_with(store):
    most = BLOCK if store.direct else 1000
    inject(Call.write, times=300, most=most)
    inject(Call.read, times=300, most=most)
    data = random_file_buffer(5 * MIB)
    store.write(0, data).wait()
    assert torch.equal(read_back(store, 0, 5 * MIB), data)


def test_a_storm_of_signals(folder):
    for call in (Call.nameless, Call.allocate, Call.read, Call.write):
        inject(call, times=1000, error=errno.EINTR)
    store, data = FileStore([folder], 5 * MIB), random_file_buffer(5 * MIB)
    store.write(0, data).wait()
    assert torch.equal(read_back(store, 0, 5 * MIB), data)


def test_a_bit_that_is_another(store, folder):
    data = random_file_buffer(5 * MIB)
    store.write(0, data).wait()
    inject(Call.read, after=1, flip=True)
    with pytest.raises(StorageError, match=f"{folder} at offset .*that were written.*CRC32C") as met:
        read_back(store, 0, 5 * MIB)
    assert met.value.facts["offset"] % BLOCK == 0
    assert torch.equal(read_back(store, 0, 5 * MIB), data), "the next time it comes right"


def test_a_write_that_was_lost(store):
    old, new = random_file_buffer(5 * MIB, 1), random_file_buffer(5 * MIB, 2)
    store.write(0, old).wait()
    inject(Call.write, error=errno.EIO)
    with pytest.raises(StorageError):
        store.write(0, new).wait()
    with pytest.raises(StorageError, match="that were written"):
        read_back(store, 0, 5 * MIB)


def test_without_verify_bits_are_believed(folder):
    store = FileStore([folder], MIB, verify=False)
    store.write(0, random_file_buffer(MIB)).wait()
    inject(Call.read, flip=True)
    assert read_back(store, 0, MIB).ne(random_file_buffer(MIB)).sum() == 1


def test_a_file_system_without_nameless_files(folder):
    inject(Call.nameless, error=errno.EOPNOTSUPP)
    store, data = FileStore([folder], MIB), random_file_buffer(MIB)
    assert not os.listdir(folder)
    store.write(0, data).wait()
    assert torch.equal(read_back(store, 0, MIB), data)


def test_a_folder_that_is_removed(folder):
    place = folder / "place"
    place.mkdir()
    store, data = FileStore([place], 3 * MIB), random_file_buffer(3 * MIB)
    place.rmdir()
    store.write(0, data).wait()
    assert torch.equal(read_back(store, 0, 3 * MIB), data), "the file needs no folder"
    with pytest.raises(ConfigError, match="No such file"):
        FileStore([place], MIB)
    inject(Call.write, error=errno.ENOSPC)
    with pytest.raises(OutOfSpace, match="No space left"):  # although nobody can say how much there is
        store.write(0, data).wait()


# --- the end of a store -----------------------------------------------------------------------------------------------


def test_a_store_that_is_dropped_finishes(folder):
    data = random_file_buffer(32 * MIB)
    handles = []
    for _ in range(2):
        store = FileStore([folder], data.numel(), threads=2)
        handles += [store.write(0, data), store.read(0, store.aligned(data.numel()))]
        del store
        gc.collect()
        assert all(handle.done() for handle in handles)
    for handle in handles[::2]:
        handle.wait()


def test_a_handle_that_is_dropped_keeps_its_buffer(folder):
    store, data = FileStore([folder], 32 * MIB), random_file_buffer(32 * MIB)
    store.write(0, data).wait()
    for _ in range(5):
        store.read(0, store.aligned(32 * MIB))  # written to when nobody has it any more
    store.close()


def _run_nursery(*arguments: Any) -> str:
    command = [sys.executable, str(HERE / "nursery.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("what", "times"),
    [("kill", 20), *(pytest.param(what, 100, marks=pytest.mark.slow) for what in ("kill", "train"))],
)
def test_nothing_is_left_of_a_process_that_is_killed(folder, what, times):
    """While it writes, and while it trains."""
    assert _run_nursery(what, folder, times) == "0"


def test_a_forked_process_leaves_the_store_alone(folder):
    assert _run_nursery("inherit", folder) == "0"


# --- under a sanitizer ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_store_under_a_sanitizer(folder, sanitizer):
    flags = ("-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    program = build_cpp_program("stress", ("crc32c", "system", "file", "store"), folder, flags=flags)
    ran = subprocess.run([*program, str(folder), "10"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "requests" in ran.stdout and not ran.stderr
