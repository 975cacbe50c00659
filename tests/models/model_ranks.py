"""What a rank of a job of real processes does: train models by some plans, and compare with plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from npuzero.comm import World
from world.toy import build
from world.train import CutSession, assert_close, run_plain

from .training import Loop, stirred


def train_models(world: World, names: Sequence[str], plans: Sequence[str]) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    for name in names:
        expected = run_plain(Loop(), world.size, stirred(name))
        for plan in plans:
            session = CutSession(build(make=stirred(name)), world, plan=plan)
            Loop()(session)
            assert_close(session.state(), expected)
