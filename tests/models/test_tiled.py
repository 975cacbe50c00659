"""Linear layers of transformers' models in tiles: they train as plain torch does, and are initialised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npuzero
from models.training import TransformersLoop, make_stirred_model
from models.zoo import ZOO
from npuzero import ConfigError, comm
from npuzero.comm import World
from world.toy import build_seeded_model
from world.train import CutSession, State, assert_states_close, run_plain

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")

#: T5's feed-forward looks at the dtype of a weight before it calls the layer.
TILES = {
    "llama": {"lm_head": 4, "*.mlp.up_proj": 5, "*.self_attn.q_proj": 3},
    "t5": {"*.wo": 3, "*.wi_0": 5},
    "vit": {"classifier": 2},
}


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("llama", TransformersLoop(steps=3)),
        ("llama", TransformersLoop(steps=3, checkpointing=True)),
        ("t5", TransformersLoop(steps=3, clip=0.5)),
        pytest.param("vit", TransformersLoop(steps=3), marks=pytest.mark.slow),
    ],
    ids=["llama", "llama, activation checkpointing", "t5", "vit"],
)
def test_models_train_in_tiles(name: str, loop: TransformersLoop) -> None:
    def rank(world: World) -> State:
        session = CutSession(
            npuzero.tiled(build_seeded_model(make=make_stirred_model(name)), TILES[name]), world, stage=3
        )
        loop(session)
        return session.state()

    expected = run_plain(loop, 2, make_stirred_model(name))
    for state in comm.run_threads(2, rank):
        assert_states_close(state, expected)


def test_a_model_on_meta_is_initialised_by_its_own_rule() -> None:
    def rank(world: World) -> State:
        with torch.device("meta"):
            model: Any = ZOO["llama"](initializer_range=0.5)
        npuzero.tiled(model, TILES["llama"])
        return npuzero.full_state_dict(
            npuzero.zero(model, stage=3, initialize=model._init_weights, world=world), rank0_only=False
        )

    for state in comm.run_threads(2, rank):
        assert state.keys() == ZOO["llama"]().state_dict().keys()
        assert 0.4 < state["lm_head.weight"].std() < 0.6


def test_what_is_no_linear_is_named() -> None:
    with pytest.raises(ConfigError, match="that of Conv1D"):
        npuzero.tiled(ZOO["gpt2"](), {"*.c_fc": 2})
    with pytest.raises(ConfigError, match="tied"):
        npuzero.tiled(ZOO["gpt2"](), {"lm_head": 2})
