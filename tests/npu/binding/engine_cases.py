"""The engine on the fake device: kernels in the emulator, collectives over the fake hccl, the model on the host."""

from __future__ import annotations

import atexit
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import npuzero
from npu.fake import compute
from npuzero.comm import World
from npuzero.plan import LOCAL, NODE, OFFLOADED, OFFLOADS, Memory, Placement, Plan, Precision
from world.parity_ranks import STAGES, state_digest
from world.toy import TrainingRecipe, build_seeded_model, toy_loss, toy_param_groups, toy_tokens
from world.train import CutSession, Session, State, assert_same_bits, run_cut, train_by_recipe

Scenario = Callable[[Session], State]


def with_scaler(session: Session) -> State:
    """One step of several overflows: how many were taken is known on the device alone."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    scaler = npuzero.LossScaler(init_scale=2.0**12, growth_interval=2)
    for step in range(4):
        loss = session.loss(step)
        scaler.scale(loss * math.inf if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {}


#: Two micro-batches would change the order of sums between plans.
STEPS = TrainingRecipe(steps=3, clip=0.5, groups=True)
RECIPE = partial(train_by_recipe, recipe=STEPS)
MICRO_BATCHES = partial(train_by_recipe, recipe=TrainingRecipe(steps=2, micro_batches=3, clip=0.5, groups=True))
IN_8_BITS = Precision(moments="int8")


class NpuSession(CutSession):
    """npuzero on this rank's npu; its data comes from the host."""

    def __init__(self, world: World, **options: Any) -> None:
        self.device = world.device
        super().__init__(build_seeded_model().to(world.device), world, **options)

    def loss(self, step: int = 0, micro_batch: int = 0, **options: Any) -> Tensor:
        (rank,) = self.ranks
        return toy_loss(self.model, toy_tokens(step, micro_batch, rank).to(self.device), **options)

    def state(self) -> State:
        return {name: value.cpu() for name, value in super().state().items()}


def train_npu_session(world: World, scenario: Scenario, **options: Any) -> State:
    session = NpuSession(world, **options)
    norms = scenario(session)
    return {name: value.cpu() for name, value in norms.items()} | session.state()


def train_on_cpu(scenario: Scenario, plan: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """What the same training gives on two ranks that are threads: its digest and values. Without torch_npu."""
    torch.set_num_threads(1)
    state = run_cut(scenario, 2, plan=plan, **options)[0]
    return state_digest({name: value.float() for name, value in state.items()}), _values_as_lists(state)


def _values_as_lists(state: State) -> dict[str, Any]:
    return {name: value.float().flatten().tolist() for name, value in state.items()}


def digest_stages(world: World) -> dict[str, str]:
    """Digests of what each plan trains; the stages to the same bits."""
    compute.compute_on_host()
    states = {plan: train_npu_session(world, RECIPE, plan=plan) for plan in STAGES}
    for state in states.values():
        assert_same_bits(state, states["zero0"])
    states["micro-batches"] = train_npu_session(world, MICRO_BATCHES, plan="zero3")
    return {name: state_digest(state) for name, state in states.items()}


def digest_offloaded(world: World) -> dict[str, str]:
    """Digests where states and gradients rest on the host, or states in files: copies go over pinned memory."""
    compute.compute_on_host()
    rows = {name: Plan.preset("zero3").offloaded(name) for name in OFFLOADS}
    return {
        f"{name}, {what}": state_digest(train_npu_session(world, scenario, plan=row, settings=_npu_settings()))
        for name, row in rows.items()
        for what, scenario in (("plain", RECIPE), ("micro-batches", MICRO_BATCHES))
    }


def by_device(world: World) -> dict[str, str]:
    """Digests where the device's kernels update what rests far, at the addresses that the device has for it."""
    compute.compute_on_host()
    settings = _npu_settings(update_on="device")
    plans = {
        "host": Plan.preset("zero3").offloaded("host"),
        "nvme": Plan.preset("zero3").offloaded("nvme"),
        "share": replace(Plan.preset("zero1"), states=Placement((NODE, LOCAL), Memory.HOST, share=0.6)),
    }
    states = {name: train_npu_session(world, RECIPE, plan=plan, settings=settings) for name, plan in plans.items()}
    states["scaler"] = train_npu_session(world, with_scaler, plan=plans["host"], settings=settings)
    coded = {"plan": Plan.preset("zero3", precision=IN_8_BITS).offloaded("nvme"), "settings": settings}
    states["8 bits"] = train_npu_session(world, RECIPE, **coded)
    return {name: state_digest(state) for name, state in states.items()}


def _npu_settings(**options: Any) -> npuzero.Settings:
    folder = tempfile.mkdtemp(dir=Path.cwd())  # /tmp may be memory
    atexit.register(os.rmdir, folder)  # what is stored has no names
    return npuzero.Settings(chunk_bytes=3000, nvme_paths=(folder,), **options)


def measure_host_copies(world: World) -> dict[str, list[dict[str, int]]]:
    """Bytes of a steady step between the device and pinned memory: as the device counts them, and as foretold."""
    compute.compute_on_host()
    found = {}
    for name in OFFLOADED:
        settings = _npu_settings()
        session = NpuSession(world, plan=name, precision="bf16", settings=settings)
        optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2)
        for step in range(3):
            for micro_batch in range(2):
                if (step, micro_batch) == (2, 0):
                    compute.copied.clear()
                session.loss(step, micro_batch).backward()
            optimizer.step()
            npuzero.report(session.model)  # waits for the update
            counted = dict(compute.copied)
            optimizer.zero_grad()
        plan = Plan.preset(name, precision="bf16")
        foretold = npuzero.predict(
            build_seeded_model(), plan, world.size, micro_batches=2, settings=settings
        ).bytes_moved
        found[name] = [counted, {link: foretold[link] for link in ("device>host", "host>device")}]
        session.state()
    return found


def away(world: World) -> dict[str, str]:
    """Digests where all of the training state leaves the device in each step; nothing of it stays there."""
    compute.compute_on_host()
    states = {}
    for plan in ("zero1", "zero3", "offload3"):
        session = NpuSession(world, plan=plan)
        optimizer = session.optimizer(torch.optim.AdamW, toy_param_groups(session.model, STEPS), lr=1e-2)
        norms = []
        for step in range(STEPS.steps):
            loss = session.loss(step)
            loss.backward()
            del loss
            _leave_device(session)
            norms.append(session.clip(0.5))
            optimizer.step()
            _leave_device(session)
            optimizer.zero_grad()
        states[plan] = {"gradient norms": torch.stack(norms).cpu()} | session.state()
    return {name: state_digest(state) for name, state in states.items()}


def _leave_device(session: NpuSession) -> None:
    large = torch.npu.memory_allocated()
    with npuzero.offloaded(session.model):
        held = npuzero.report(session.model).held
        left = torch.npu.memory_allocated()
        assert not any(held[Memory.DEVICE].values())
        assert large - left >= sum(parameter.nbytes for parameter in session.model.parameters()) // session.world
        assert torch.npu.memory_reserved() - left < 2**21, "what torch's allocator keeps is given back, too"


def run_engine_cases(world: World) -> dict[str, Any]:
    """What each of these cases returns, by name."""
    return {
        case.__name__: case(world) for case in (away, digest_stages, digest_offloaded, by_device, measure_host_copies)
    }


def other_states(world: World) -> dict[str, str]:
    """Digests where moments are codes, and where the device counts steps."""
    compute.compute_on_host()
    coded = train_npu_session(world, RECIPE, plan="zero3", precision=IN_8_BITS)
    return {"8 bits": state_digest(coded), "scaler": state_digest(train_npu_session(world, with_scaler, plan="zero3"))}


def low_precision(world: World) -> dict[str, Any]:
    """Values in bfloat16, to be compared within a bound: hccl rounds sums of bfloat16 wires to bfloat16."""
    compute.compute_on_host()
    state = train_npu_session(world, RECIPE, plan="zero3", precision="bf16")
    return _values_as_lists(state)


def measure_steady_step(world: World) -> tuple[int, list[str]]:
    """A step reads nothing of the device on the host, neither to decide nor to wait: without and with a loss scaler.

    Returns:
        Bytes of control, and the operators of the optimizer's part that torch_npu has no kernel for: it runs those on
        the host.
    """
    compute.compute_on_host()
    sent, called = 0, set()
    for scaler in (npuzero.LossScaler(enabled=False), npuzero.LossScaler(init_scale=2.0**12)):
        session = NpuSession(world, plan="zero3")
        optimizer = npuzero.AdamW(session.model.parameters(), lr=1e-2)

        def step(number: int, scaler: Any = scaler, session: NpuSession = session, optimizer: Any = optimizer) -> None:
            scaler.scale(session.loss(number)).backward()
            with OperatorNames() as operators:
                scaler.unscale_(optimizer)
                session.clip(0.5)
                scaler.step(optimizer)
                scaler.update()
            called.update(operators.names)
            optimizer.zero_grad()

        for number in range(2):
            step(number)
        with compute.forbid_host_reads():
            for number in range(2, 4):
                step(number)
        assert torch.isfinite(torch.cat([value.flatten() for value in session.state().values()])).all()
        sent += npuzero.report(session.model).bytes_sent["control"]
    assert "aten::pow.Tensor_Tensor" in called  # a coefficient's
    return sent, sorted(name for name in called if not _has_kernel(name))


class OperatorNames(TorchDispatchMode):
    """The names of torch's operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def _has_kernel(name: str) -> bool:
    """On an npu: torch_npu's own, or one of torch's that is made of others."""
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
