"""initialize() over axes: pipelines, tensor ranks and shared sequences from a configuration, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import parallel
from npuzero.comm import World, run_threads
from npuzero.compat.internevo import initialize, load
from npuzero.errors import ConfigError
from world import toy

TEXT = """
data = dict(micro_num={micro_num})
hybrid_zero_optimizer = dict(overlap_sync_grad=True, clip_grad_norm=1.0)
adam = dict(lr=1e-2, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-3, weight_decay=0.01)
model = dict(dtype="torch.{dtype}", num_chunks={chunks}, checkpoint={checkpoint})
parallel = dict({parallel})
"""
STEPS = 3


def write_start_config(
    path: Any, parallel: str, micro_num: int = 1, chunks: int = 1, checkpoint: float = 0, **more: Any
) -> Any:
    values = {"micro_num": micro_num, "chunks": chunks, "checkpoint": checkpoint, "dtype": "float32", **more}
    path.write_text(TEXT.format(parallel=parallel, **values))
    return load(path)


def train_plain_adamw(model: nn.Module, losses: Any) -> dict[str, Tensor]:
    """The weights after some steps of torch's own, and of one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def assert_weights_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 2e-6, name


def build_start_stack() -> nn.Module:
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # noqa: E731
    return toy.build_seeded_model(make=lambda: nn.Sequential(*(block() for _ in range(4))))


@pytest.mark.parametrize(
    ("pipeline", "chunks", "checkpoint"),
    [("size=2", 1, 0.5), ("size=2, zero_bubble=True", 1, 0), ("size=2, interleaved_overlap=True", 2, 0)],
)
def test_a_pipeline_trains_as_one_process(tmp_path, pipeline, chunks, checkpoint):
    def batch(step: int) -> Tensor:
        return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))

    config = write_start_config(tmp_path / "config.py", f"pipeline=dict({pipeline})", 4, chunks, checkpoint)

    def body(world: World) -> dict[str, Tensor]:
        made = initialize(build_start_stack(), config, world=world, loss_fn=F.mse_loss)
        assert made.lr_scheduler is made.beta2_scheduler is None
        for step in range(STEPS):
            made.model.step(batch(step), target=batch(step + 100))
            done, norms = made.optimizer.step()
            assert done and norms["0_default"] > 0
        return npuzero.full_state_dict(made.model, rank0_only=False)

    expected = train_plain_adamw(
        build_start_stack(), lambda model, step: F.mse_loss(model(batch(step)), batch(step + 100))
    )
    for found in run_threads(2, body):
        assert_weights_close(found, expected)


def test_a_pipelines_loss_is_scaled_without_a_word(tmp_path):
    config = write_start_config(tmp_path / "config.py", "pipeline=2", 4, dtype="bfloat16")
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def body(world: World) -> Any:
        made = initialize(build_start_stack(), config, world=world, loss_fn=F.mse_loss)
        loss = made.model.step(batch, target=batch.bfloat16())
        assert made.model.step(batch, train=False) is None or world.rank == 1
        done, norms = made.optimizer.step()
        return loss.item(), made.optimizer.loss_scale.item(), done, norms["0_default"]

    model = build_start_stack()
    expected = F.mse_loss(model(batch), batch)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for loss, scale, done, found in run_threads(2, body):
        assert (scale, done) == (2.0**16, True)
        assert loss == pytest.approx(expected.item(), rel=0.05)
        assert found == pytest.approx(norm.item(), rel=0.05)


def build_start_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return toy.build_seeded_model(
        make=lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    )


def start_tokens(step: int) -> dict[str, Tensor]:
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "axes",
    [
        "tensor=dict(size=2, mode='msp')",
        "tensor=2, zero1=dict(size=1)",
        "tensor=dict(size=2, mode='isp'), weight=dict(size=2, overlap=True)",
        "tensor=dict(size=2, mode='isp'), weight=1",
    ],
)
def test_divided_models_train_as_one_process(tmp_path, axes):
    config = write_start_config(tmp_path / "config.py", axes, checkpoint=1)

    def body(world: World) -> dict[str, Tensor]:
        made = initialize(build_start_llama(), config, world=world)
        for step in range(STEPS):
            part = parallel.slice(start_tokens(step), made.mesh) if config.mode == "isp" else start_tokens(step)
            made.optimizer.backward(made.model(**part).loss)
            assert made.optimizer.step()[0]
        return npuzero.full_state_dict(made.model, rank0_only=False)

    expected = train_plain_adamw(build_start_llama(), lambda model, step: model(**start_tokens(step)).loss)
    for found in run_threads(2, body):
        assert_weights_close(found, expected)


def test_a_program_may_divide_its_model_itself(tmp_path):
    config = write_start_config(tmp_path / "config.py", "tensor=2")

    def body(world: World) -> Any:
        words = {"0.0": "colwise", "1.0": "rowwise"}
        divide = lambda model, mesh: parallel.tensor(model, mesh, plan=words)  # noqa: E731
        made = initialize(build_start_stack(), config, world=world, divide=divide)
        return parallel.tensor_bytes(made.model)

    assert len(run_threads(2, body)) == 2


def test_sizes_that_the_ranks_do_not_have_are_refused_on_every_rank(tmp_path):
    config = write_start_config(tmp_path / "config.py", "tensor=3")
    with pytest.raises(ConfigError, match=r"parallel\.tensor\.size"):
        run_threads(2, lambda world: initialize(build_start_stack(), config, world=world))
