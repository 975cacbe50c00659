"""An engine without an optimizer, such as of a reference model: it computes, loads and saves, and refuses to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from compat.deepspeed.reference import DenseGPT
from npuzero import comm
from npuzero.comm import World
from npuzero.errors import StateError
from world.toy import build_seeded_model, toy_tokens

#: As a reference model's file usually is: that of the training, without an optimizer.
SHARED = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR"}}


@pytest.mark.parametrize(
    ("zero", "half"),
    [
        ({"stage": 0}, {}),
        ({"stage": 1}, {"bf16": {"enabled": True}}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"fp16": {"enabled": True}}),
        ({"stage": 3}, {"bf16": {"enabled": True}}),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {"bf16": {"enabled": True}}),
    ],
    ids=["0", "1", "2 offload", "3", "3 offload"],
)
def test_a_reference_model_computes_as_without_an_engine(
    zero: dict[str, Any], half: dict[str, Any], tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if "bf16" in half else torch.float16 if half else torch.float32

    def rank(world: World) -> None:
        plain = build_seeded_model(make=DenseGPT).to(dtype).eval()
        engine, optimizer, _, schedule = npuzero.initialize(
            model=build_seeded_model(make=DenseGPT), config={**SHARED, **half, "zero_optimization": zero}
        )
        assert optimizer is None and engine.optimizer is None and schedule is None
        assert engine.eval() is engine and not engine.module.training
        tokens = toy_tokens(0, 0, world.rank)[:, :-1]
        with torch.no_grad():
            expected = plain(tokens)
            for _ in range(2):
                assert torch.equal(engine(tokens), expected)
        assert engine.get_lr() == engine.get_mom() == [] and engine.get_global_grad_norm() is None
        engine.zero_grad()
        for call in (engine.step, lambda: engine.backward(expected.mean()), lambda: engine.scale(expected.mean())):
            with pytest.raises(StateError, match=r"an engine with an optimizer; got one for inference"):
                call()
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        other = npuzero.initialize(
            model=build_seeded_model(seed=1, make=DenseGPT), config={**SHARED, **half, "zero_optimization": zero}
        ).engine
        assert other.load_checkpoint(tmp_path)[1] == {"epoch": 1}
        with torch.no_grad():
            assert torch.equal(other.eval()(tokens), expected)

    comm.run_threads(2, rank)


def test_a_reference_model_takes_the_weights_of_a_training_run(tmp_path: Path) -> None:
    """Which has an optimizer, and another stage."""

    def rank(world: World) -> None:
        training = {**SHARED, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}}
        engine = npuzero.initialize(model=build_seeded_model(make=DenseGPT), config=training).engine
        engine.backward(engine(toy_tokens(0, 0, world.rank)[:, :-1]).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
        reference = npuzero.initialize(
            model=build_seeded_model(seed=1, make=DenseGPT), config={**SHARED, "zero_optimization": {"stage": 3}}
        ).engine
        reference.load_checkpoint(tmp_path)
        found, expected = (npuzero.full_state_dict(e.module, rank0_only=False) for e in (reference, engine))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(parameter.requires_grad for parameter in reference.module.parameters())

    comm.run_threads(2, rank)
