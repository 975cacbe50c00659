"""Work for the teams of test_team.py."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


class TeamWork:
    def __init__(self, rank: int, size: int, options: dict[str, Any]) -> None:
        self.rank, self.size, self.options, self.calls, self.prepared = rank, size, options, 0, 0

    def prepare(self) -> None:
        self.prepared += 1

    def run(self) -> None:
        print("a library that talks")
        self.calls += 1
        if self.options.get("fails") == self.rank:
            print("what it said last", file=sys.stderr, flush=True)
            {"raises": self.raises, "dies": self.dies, "hangs": self.hangs}[self.options["how"]]()

    def raises(self) -> None:
        raise ValueError("no such thing")

    def dies(self) -> None:
        os._exit(3)

    def hangs(self) -> None:
        time.sleep(600)

    def told(self, factor: int) -> list[Any]:
        variables = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")]
        return [factor * self.rank, self.calls, self.prepared, *variables]

    def pid(self) -> int:
        return os.getpid()

    def hold(self, count: int) -> None:
        self.held = bytearray(count)


def make(rank: int, size: int, options: dict[str, Any]) -> TeamWork:
    if options.get("how") == "unmade":
        raise RuntimeError("cannot be made")
    return TeamWork(rank, size, options)
