"""torch reads npuzero's checkpoints, and npuzero reads torch's: FSDP2, plain torch, and files of torch.save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from npuzero import checkpoint, comm
from npuzero.comm import World
from npuzero.errors import CheckpointError
from world.comm_ranks import rank_results, run_comm_ranks

from . import torch_ranks
from .torch_ranks import (
    SAVED,
    NpuzeroTraining,
    assert_tensors_equal,
    build_fsdp_model,
    checkpoint_loss,
    global_batch_tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.mark.world
def test_fsdp2_both_ways(tmp_path: Path) -> None:
    rank_results(
        run_comm_ranks(2, torch_ranks.exchange_both_ways, tmp_path, folder=tmp_path, backend="gloo", limit_s=120.0)
    )


def train_and_save_npuzero(folder: Path, plan: str = "zero3", ranks: int = 2) -> dict[str, torch.Tensor]:
    def train(world: World) -> dict[str, torch.Tensor]:
        ours = NpuzeroTraining(world, 0, plan)
        ours.steps(0, SAVED)
        checkpoint.save(folder, ours.model, ours.optimizer, step=SAVED, extra={"note": "a"})
        return ours.state()

    return comm.run_threads(ranks, train)[0]


def test_plain_torch_loads_ours(tmp_path: Path) -> None:
    """Load by dcp.load into full tensors, and as one file of torch.save."""
    expected = train_and_save_npuzero(tmp_path)
    path = checkpoint.latest(tmp_path)
    plain = build_fsdp_model(1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0)
    checkpoint_loss(plain, global_batch_tokens(0)).backward()
    optimizer.step()
    names = [name for name, _ in plain.named_parameters()]
    state = {
        "model": plain.state_dict(),
        "optim": {"state": {names[i]: values for i, values in optimizer.state_dict()["state"].items()}},
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert_tensors_equal(torch_ranks.flatten_states(state["model"], state["optim"]["state"]), expected)

    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_tensors_equal(torch_ranks.flatten_states(whole["model"], whole["optim"]["state"]), expected)
    assert whole["extra"] == {"note": "a"} and whole["step"] == SAVED
    plain.load_state_dict(whole["model"])
    optimizer.load_state_dict(
        {
            "state": {names.index(name): values for name, values in whole["optim"]["state"].items()},
            "param_groups": [
                {**group, "params": [names.index(name) for name in group["params"]]}
                for group in whole["optim"]["param_groups"]
            ],
        }
    )
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("numbered", (True, False))
def test_we_load_plain_torchs(numbered: bool, tmp_path: Path) -> None:
    """Save state_dict()s by dcp.save: optimizer states by number, or the model alone without a prefix."""
    plain = build_fsdp_model(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    checkpoint_loss(plain, global_batch_tokens(0)).backward()
    optimizer.step()
    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()} if numbered else plain.state_dict()
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)

    def load(world: World) -> dict[str, torch.Tensor]:
        ours = NpuzeroTraining(world, 1, "zero3")
        checkpoint.load(tmp_path, ours.model, ours.optimizer if numbered else None)
        return ours.state()

    names = [name for name, _ in plain.named_parameters()]
    states = optimizer.state_dict()["state"] if numbered else {}
    expected = torch_ranks.flatten_states(plain.state_dict(), {names[i]: values for i, values in states.items()})
    for found in comm.run_threads(2, load):
        assert_tensors_equal(found, expected)


def test_numbered_groups_of_another_length(tmp_path: Path) -> None:
    plain = build_fsdp_model(0)
    optimizer = torch.optim.AdamW(list(plain.parameters())[:5])
    dcp.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    ours = NpuzeroTraining(comm.SingleWorld(), 1, "zero3")
    with pytest.raises(CheckpointError, match="a group of the"):
        checkpoint.load(tmp_path, ours.model, ours.optimizer)
