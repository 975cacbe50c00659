"""Forks children that use a store, and ends them: by SIGKILL while they write, or by themselves. Run as a script.

    python nursery.py kill FOLDER TIMES     prints how many of the children left something in the folder
    python nursery.py inherit FOLDER        a child that inherits a store of its parent's leaves it alone

Children of a process without threads: it imports torch once for all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from npuzero.errors import StateError
from npuzero.memory.file import FileStore

NBYTES = 16 << 20


def write_for_ever(folder: Path, ready: int) -> None:
    store = FileStore([folder], NBYTES)
    buffer = store.aligned(NBYTES)
    buffer.fill_(1)
    os.write(ready, b"r")
    while True:
        store.write(0, buffer).wait()


def kill(folder: Path, times: int) -> int:
    left = 0
    for _ in range(times):
        ends = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(folder, ends[1])
        os.close(ends[1])
        assert os.read(ends[0], 1) == b"r"
        os.close(ends[0])
        time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        left += bool(os.listdir(folder))
    return left


def inherit(folder: Path) -> int:
    """The child's end of the store is not the parent's; 0 where both came through."""
    store = FileStore([folder], NBYTES)
    buffer = store.aligned(NBYTES)
    buffer.fill_(3)
    before = store.write(0, buffer)
    child = os.fork()
    if child == 0:
        own = FileStore.aligned(NBYTES)
        try:
            store.write(0, own)
        except StateError:
            store.close()
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    before.wait()
    back = store.aligned(NBYTES)
    store.read(0, back).wait()
    return code or int(not back.eq(3).all())


if __name__ == "__main__":
    verb, where, *rest = sys.argv[1:]
    print(kill(Path(where), int(rest[0])) if verb == "kill" else inherit(Path(where)))
