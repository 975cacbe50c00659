"""Ranks that fail, for what `ranks.run` says of them."""

from __future__ import annotations

import os
import signal
import time

from npuzero.comm import World


def dies_while_the_other_waits(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    _waits_in_vain()


def _waits_in_vain() -> None:
    time.sleep(60)
