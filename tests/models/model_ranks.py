"""What a rank of a job of real processes does: train models by some plans, and compare with plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from npuzero.comm import World
from world.toy import build_seeded_model
from world.train import CutSession, assert_states_close, run_plain

from .training import TransformersLoop, make_stirred_model


def train_models(world: World, names: Sequence[str], plans: Sequence[str]) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    for name in names:
        expected = run_plain(TransformersLoop(), world.size, make_stirred_model(name))
        for plan in plans:
            session = CutSession(build_seeded_model(make=make_stirred_model(name)), world, plan=plan)
            TransformersLoop()(session)
            assert_states_close(session.state(), expected)
