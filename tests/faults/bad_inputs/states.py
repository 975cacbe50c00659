"""Bad inputs: saved states."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

import npuzero
from npuzero import CheckpointError, StateError
from npuzero.comm import World
from world.toy import build_seeded_model

from .case import BadInputTable, bad_input_loss, shard_toy

TABLE = BadInputTable()
bad = TABLE.bad


def _load_changed_state(world: World, change: Callable[[dict[str, Any]], object]) -> None:
    state = build_seeded_model().state_dict()
    model = shard_toy(world)
    npuzero.load_full_state_dict(model, change(state) or state)  # type: ignore[arg-type]


for _name, _change, _says in [
    ("name missing", lambda state: state.pop("scale") and None, (r"missing 'scale'\.",)),
    ("name unknown", lambda state: state.update(scaled=torch.ones(())), (r"got unknown 'scaled'\.",)),
    (
        "name misspelt",
        lambda state: state.update(scaled=state.pop("scale")),
        (r"missing 'scale' \(there is 'scaled'\)",),
    ),
    ("many unknown", lambda state: state.update({f"x{i}": 0 for i in range(9)}), ("unknown 'x0', .*'x4' and 4 more",)),
    ("wrong shape", lambda state: state.update({"norm.weight": torch.ones(17)}), ("norm.weight", "16", "17")),
    ("wrong shape of a buffer", lambda state: state.update(seen=torch.ones(2)), ("seen", "2")),
    ("no tensor", lambda state: state.update(scale=1.0), ("scale", "float")),
    ("no mapping", lambda state: [1], ("list",)),
    ("on meta", lambda state: state.update({"norm.weight": torch.ones(16, device="meta")}), ("norm.weight", "meta")),
]:
    bad(f"load_full_state_dict: {_name}", CheckpointError, *_says, ranks=2)(
        lambda world, change=_change: _load_changed_state(world, change)
    )


@bad("load_full_state_dict: name missing on one rank", CheckpointError, "scale", ranks=2)
def _(world: World) -> None:
    _load_changed_state(world, lambda state: state.pop("scale") and None if world.rank else None)


def _load_optimizer(world: World, change: Callable[[Any], object], kind: Any = torch.optim.AdamW) -> None:
    plain = build_seeded_model()
    optimizer = kind(plain.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    bad_input_loss(plain).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state = change(state) or state
    npuzero.AdamW(shard_toy(world).parameters()).load_state_dict(state)


def _first_param_state(state: Any) -> Any:
    return next(iter(state["state"].values()))


def _last_param_state(state: Any) -> Any:
    return list(state["state"].values())[-1]


def _drop_group_param(state: Any) -> None:
    state["param_groups"][0]["params"].pop()


def _add_empty_group(state: Any) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": []})


for _name, _change, _says in [
    ("a parameter fewer", _drop_group_param, ("groups of", "groups")),
    ("a group more", _add_empty_group, ("groups",)),
    ("wrong shape", lambda state: _first_param_state(state).update(exp_avg=torch.ones(3)), ("exp_avg", "3")),
    ("wrong shape of a vector", lambda state: _last_param_state(state).update(exp_avg=torch.ones(())), ("exp_avg",)),
    ("moment missing", lambda state: _first_param_state(state).pop("exp_avg_sq") and None, ("exp_avg_sq",)),
    ("step missing", lambda state: _first_param_state(state).pop("step") and None, ("step",)),
    ("no groups", lambda state: state.pop("param_groups") and None, ("param_groups",)),
    ("no mapping", lambda state: [state], ("list",)),
]:
    bad(f"optimizer's load_state_dict: {_name}", CheckpointError, *_says, ranks=2)(
        lambda world, change=_change: _load_optimizer(world, change)
    )


@bad("optimizer's load_state_dict: SGD's into AdamW", CheckpointError, "exp_avg|step", ranks=2)
def _(world: World) -> None:
    _load_optimizer(world, lambda state: None, torch.optim.SGD)


@bad("a checkpoint that is a file", CheckpointError, "got a file", r"torch\.load", ranks=2)
def _(world: World) -> None:
    model = shard_toy(world)
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        npuzero.checkpoint.load(file.name, model)


@bad("extra of a class of one's own", CheckpointError, r"dict: one that needs .*ToyGPT\. ", "state_dict")
def _(world: World) -> None:
    model = shard_toy(world)
    with tempfile.TemporaryDirectory() as folder:
        npuzero.checkpoint.save(folder, model, step=1, extra={"model": build_seeded_model()})


bad("a folder for the model", StateError, r"got 'run' \(str\)")(
    lambda world: npuzero.checkpoint.save(shard_toy(world), "run", step=1)  # type: ignore[arg-type]
)
