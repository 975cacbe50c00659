"""Loss scaling: every decision equals torch's scaler's, and a skipped step leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import npuzero
from npuzero import LossScaler, comm
from npuzero.comm import World
from npuzero.optim import TakenSteps
from world.toy import ToyGPT, build_seeded_model, toy_loss, toy_tokens
from world.train import CutSession, Session, State, assert_same_bits, check_equals_plain, run_cut

PLANS = ("zero1", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)
#: By step: which of the ranks overflow, modulo their number.
OVERFLOWS: dict[int, tuple[int, ...]] = {1: (0,), 2: (3,), 6: (1, 2), 7: (0, 1, 2, 3)}
STEPS = 10


def poisoned_loss(session: Session, step: int, micro_batch: int = 0) -> Tensor:
    """Return the loss; some ranks' part is infinite."""

    def of(rank: int) -> Tensor:
        bad = any(rank == other % session.world for other in OVERFLOWS.get(step, ()))
        loss = toy_loss(session.model, toy_tokens(step, micro_batch, rank))
        return loss * math.inf if bad and micro_batch == 0 else loss

    return session.mean(of)


def make_scaler_scenario(
    optimizer: Callable[[Session], torch.optim.Optimizer], clip: float | None = None, micro_batches: int = 1
) -> Callable[[Session], State]:
    """Train with the overflows of the table; return the scaler's state after each step."""

    def scenario(session: Session) -> State:
        updates = optimizer(session)
        scaler = session.scaler(init_scale=2.0**12, growth_interval=3)
        seen = []
        for step in range(STEPS):
            for micro_batch in range(micro_batches):
                scaler.scale(poisoned_loss(session, step, micro_batch)).backward()
            if clip is not None:
                scaler.unscale_(updates)
                session.clip(clip)
            looks = step in OVERFLOWS
            before = (session.state(), updates.state_dict()["state"]) if looks else ({}, {})
            scaler.step(updates)
            scaler.update()
            updates.zero_grad()
            if looks:
                assert_same_bits(session.state(), before[0])
                assert_same_states(updates.state_dict()["state"], before[1])
            state = scaler.state_dict()
            seen.append([state["scale"], state["_growth_tracker"]])
        return {"decisions": torch.tensor(seen)}

    return scenario


def assert_same_states(found: dict[int, Any], expected: dict[int, Any]) -> None:
    assert found.keys() == expected.keys()
    for number, state in expected.items():
        assert_same_bits(found[number], {name: torch.as_tensor(value) for name, value in state.items()})


def build_scaler_adamw(session: Session) -> torch.optim.Optimizer:
    return session.optimizer(torch.optim.AdamW, lr=3e-3)


def build_momentum_sgd(session: Session) -> torch.optim.Optimizer:
    return session.optimizer(torch.optim.SGD, lr=1e-2, momentum=0.9)


ADAMW, CLIPPED = (
    make_scaler_scenario(build_scaler_adamw),
    make_scaler_scenario(build_scaler_adamw, clip=0.5, micro_batches=2),
)
MOMENTUM = make_scaler_scenario(build_momentum_sgd)


@every_plan
@pytest.mark.parametrize("scenario", [ADAMW, CLIPPED, MOMENTUM], ids=["AdamW", "clipped", "momentum"])
def test_decisions_are_torchs(plan: str, scenario: Callable[[Session], State]) -> None:
    found = check_equals_plain(scenario, 4, plan=plan, local_size=2)["decisions"]
    assert found[:3, 0].tolist() == [2.0**12, 2.0**11, 2.0**10]
    assert found[-1].tolist() == [2.0**9, 2]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_decisions_are_torchs_on_fewer_ranks(plan: str, size: int) -> None:
    check_equals_plain(CLIPPED, size, plan=plan)


@pytest.mark.parametrize(
    "precision",
    ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "bf16-stochastic", "bf16-8bit"))],
)
@every_plan
def test_a_skipped_step_leaves_no_trace(plan: str, precision: str) -> None:
    """With a scaler and overflows: bit for bit the result of the remaining steps alone, bias correction included."""

    def scaled(session: Session) -> None:
        optimizer, scaler = build_scaler_adamw(session), session.scaler(init_scale=2.0**12, growth_interval=3)
        for step in range(STEPS):
            scaler.scale(poisoned_loss(session, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {STEPS - 4.0}
        assert scaler.skipped == 4

    def plain(session: Session) -> None:
        optimizer = build_scaler_adamw(session)
        for step in set(range(STEPS)) - set(OVERFLOWS):
            session.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    found, expected = (
        run_cut(scenario, 4, plan=plan, local_size=2, precision=precision) for scenario in (scaled, plain)
    )
    assert_same_bits(found[0], expected[0])


def test_float16_overflows_by_itself_and_learns() -> None:
    """From 2^24 down to where gradients fit, alike under every stage; then the loss falls."""

    def scenario(session: Session) -> State:
        optimizer, scaler = session.optimizer(torch.optim.AdamW, lr=3e-3), session.scaler(init_scale=2.0**24)
        losses = []
        for _ in range(40):
            loss = session.loss()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            session.clip(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert 0 < scaler.skipped < 20 and losses[-1] < 0.5 * losses[0]
        return {"scale": torch.tensor(scaler.get_scale())}

    first, *others = (run_cut(scenario, 2, plan=f"zero{stage}", precision="fp16")[0] for stage in range(4))
    for other in others:
        assert_same_bits(other, first)


def test_parameters_that_come_and_go_have_steps_of_their_own() -> None:
    """Some steps leave a block out, and some of these are skipped; its bias correction counts the steps it took."""

    class Sometimes(ToyGPT):
        def run_blocks(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                if i != 1 or self.used:
                    x = block(x)
            return x

    def scenario(session: Session) -> State:
        optimizer, scaler = build_scaler_adamw(session), session.scaler(init_scale=2.0**12)
        for step in range(STEPS):
            session.model.used = step % 3 != 0
            scaler.scale(poisoned_loss(session, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps = [float(state["step"]) for _, state in sorted(optimizer.state_dict()["state"].items())]
        return {"steps": torch.tensor(steps)}

    assert set(check_equals_plain(scenario, 2, Sometimes, plan="zero3")["steps"].tolist()) == {3.0, 6.0}


@every_plan
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_two_optimizers_under_one_scaler(plan: str, clip: float | None, kind: type[torch.optim.Optimizer]) -> None:
    """Each unscales its half of the model, and skips its step if that overflows; the scale depends on both."""

    def scenario(session: Session) -> State:
        parameters = dict(session.model.named_parameters())
        heads = [parameter for name, parameter in parameters.items() if not name.startswith("blocks")]
        blocks = [parameter for name, parameter in parameters.items() if name.startswith("blocks")]
        optimizers = [session.optimizer(kind, part, lr=3e-3) for part in (heads, blocks)]
        scaler = session.scaler(init_scale=2.0**12, growth_interval=3)
        scales = []
        step = 0
        # An overflow of a gradient that no other gradient depends on: one optimizer's alone.
        parameters["scale"].register_hook(lambda gradient: gradient * math.inf if step == 2 else gradient)
        for step in range(6):
            scaler.scale(session.loss(step)).backward()
            if clip is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                if step != 2:  # the norm is infinite there, under torch's scaler as well
                    session.clip(clip)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        counts = [float(s["step"]) for o in optimizers for s in o.state_dict()["state"].values() if "step" in s]
        return {"scales": torch.tensor(scales), "counts": torch.tensor(counts)}

    found = check_equals_plain(scenario, 2, plan=plan)
    assert found["scales"].tolist() == [2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**12]
    if kind is torch.optim.AdamW:
        assert set(found["counts"].tolist()) == {5.0, 6.0}


def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From unscaling to the new scale no value comes back to the host."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a value was asked for")

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), 3, world=world)
        optimizer, scaler = npuzero.AdamW(model.parameters()), LossScaler()
        for _ in range(2):
            scaler.scale(toy_loss(model, toy_tokens(0, 0, 0))).backward()
            with monkeypatch.context() as patch:
                for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"):
                    patch.setattr(Tensor, name, refuse)
                scaler.unscale_(optimizer)
                npuzero.clip_grad_norm_(model, 1.0)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()

    comm.run_threads(1, rank)


# -- the calls, over plain parameters ----------------------------------------------------------------------------------

GRADIENTS = st.sampled_from([0.5, -3.0, 0.0, math.inf, -math.inf, math.nan])


@settings(max_examples=40, deadline=None)
@given(
    gradients=st.lists(st.tuples(GRADIENTS, GRADIENTS), min_size=1, max_size=30),
    growth=st.sampled_from([1.5, 2.0, 3.0, 2.0**40]),
    backoff=st.sampled_from([0.5, 0.75, 0.1]),
    interval=st.integers(1, 5),
    scale=st.sampled_from([1.0, 2.0**16, 3.0e38]),
)
def test_any_sequence_of_overflows_decides_as_torch(
    gradients: list[tuple[float, float]], growth: float, backoff: float, interval: int, scale: float
) -> None:
    options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval, "init_scale": scale}
    contenders = [
        (torch.amp.GradScaler("cpu", **options), [nn.Parameter(torch.ones(2)) for _ in range(2)]),
        (LossScaler("cpu", **options, floor=2.0**-140), [nn.Parameter(torch.ones(2)) for _ in range(2)]),
    ]
    for pair in gradients:
        seen = []
        for scaler, parameters in contenders:
            optimizer = torch.optim.SGD(parameters, lr=0.125)
            scaler.scale(sum(parameter.sum() for parameter in parameters))  # the scale is made
            for parameter, value in zip(parameters, pair, strict=True):
                parameter.grad = torch.tensor([1.0, value])
            scaler.step(optimizer)
            scaler.update()
            state = scaler.state_dict()
            seen.append(([state["scale"], state["_growth_tracker"]], [p.tolist() for p in parameters]))
        assert seen[0] == seen[1]


class ByCredit:
    """The hysteresis of Megatron-LM and InternEvo: overflows are paid from a credit, which growth restores."""

    def __init__(self, scale: float, interval: int, hysteresis: int, floor: float, ceiling: float) -> None:
        self.scale, self.window, self.credit = scale, 0, hysteresis
        self.interval, self.hysteresis, self.floor, self.ceiling = interval, hysteresis, floor, ceiling

    def see(self, overflow: bool) -> None:
        self.window = 0 if overflow else self.window + 1
        if overflow:
            self.credit = max(self.credit - 1, 0)
            self.scale = max(self.scale / 2, self.floor) if self.credit == 0 else self.scale
        elif self.window == self.interval:
            self.scale, self.window, self.credit = min(self.scale * 2, self.ceiling), 0, self.hysteresis


class ByIteration:
    """DeepSpeed's scale: growth depends on the iterations strictly between now and the last overflow."""

    def __init__(self, scale: float, interval: int, hysteresis: int, floor: float, consecutive: bool) -> None:
        self.scale, self.now, self.overflowed, self.left = scale, 0, -1, hysteresis
        self.interval, self.hysteresis, self.floor, self.consecutive = interval, hysteresis, floor, consecutive

    def see(self, overflow: bool) -> None:
        between = self.now - self.overflowed - 1
        if overflow and self.left == 1:
            self.scale = max(self.scale / 2, self.floor)
        elif overflow:
            self.left -= 1
        elif between > 0 and between % self.interval == 0:
            self.scale, self.left = self.scale * 2, self.hysteresis
        if overflow:
            self.overflowed = self.now
        elif self.consecutive:
            self.left = self.hysteresis
        self.now += 1


RUN = {
    "overflows": st.lists(st.booleans(), min_size=1, max_size=60),
    "hysteresis": st.integers(1, 4),
    "interval": st.integers(1, 6),
    "floor": st.sampled_from([1.0, 2.0**9, 2.0**10]),
}


def assert_scales_as(scaler: LossScaler, overflows: list[bool], expected: ByCredit | ByIteration) -> None:
    """Return both states after each step; in the middle of the run a new scaler loads the state."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step, overflow in enumerate(overflows):
        if step == len(overflows) // 2:
            state, scaler = scaler.state_dict(), LossScaler()
            scaler.load_state_dict(state)
            assert scaler.state_dict() == state
        scaler.scale(parameter.sum())
        parameter.grad = torch.tensor([math.nan if overflow else 0.0])
        scaler.step(optimizer)
        scaler.update()
        expected.see(overflow)
        assert scaler.get_scale() == expected.scale
    assert scaler.skipped == sum(overflows) and parameter.item() == 1.0


@settings(max_examples=40, deadline=None)
@given(**RUN, ceiling=st.sampled_from([2.0**10, 2.0**12, math.inf]))
def test_hysteresis_between_floor_and_ceiling(
    overflows: list[bool], hysteresis: int, interval: int, floor: float, ceiling: float
) -> None:
    options = {"growth_interval": interval, "hysteresis": hysteresis, "floor": floor, "ceiling": ceiling}
    scaler = LossScaler(init_scale=2.0**10, **options)
    assert_scales_as(scaler, overflows, ByCredit(2.0**10, interval, hysteresis, floor, ceiling))


@settings(max_examples=60, deadline=None)
@given(**RUN, consecutive=st.booleans())
@example(overflows=[True, False, True], hysteresis=2, interval=6, floor=1.0, consecutive=True)  # a rare case
def test_deepspeeds_scale_in_both_its_forms(
    overflows: list[bool], hysteresis: int, interval: int, floor: float, consecutive: bool
) -> None:
    options = {"growth_interval": interval, "hysteresis": hysteresis, "floor": floor}
    scaler = LossScaler(init_scale=2.0**10, consecutive_hysteresis=consecutive, growth_delay=1, **options)
    assert_scales_as(scaler, overflows, ByIteration(2.0**10, interval, hysteresis, floor, consecutive))


@pytest.mark.parametrize("stage", range(4))
def test_a_static_scale_skips_and_stays(stage: int) -> None:
    """As with a nonzero ``loss_scale`` of DeepSpeed: an overflow on one rank skips the step on all ranks."""

    def scenario(session: Session) -> State:
        optimizer = build_scaler_adamw(session)
        scaler = session.scaler(init_scale=128.0, growth_interval=1, floor=128.0, ceiling=128.0)
        for step in range(4):
            scaler.scale(poisoned_loss(session, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 128.0
        return {"skipped": torch.tensor(scaler.skipped)}

    for found in run_cut(scenario, 2, plan=f"zero{stage}"):
        assert found["skipped"].item() == 2


@settings(max_examples=40, deadline=None)
@given(
    first=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 63), st.sampled_from([None, 0.0, 1.0])), max_size=20),
)
def test_steps_counted_on_the_device(first: list[int], steps: list[tuple[int, float | None]]) -> None:
    """Slots begin with different counts; each step is taken by some, and may be skipped."""
    taken, expected = TakenSteps(), list(first)
    for i, step in enumerate(first):
        taken.begin(i, step, torch.device("cpu"))
    for mask, skip in steps:
        used = [i for i in range(len(first)) if mask >> i & 1]
        taken.part(used)
        assert [taken.counts[i].item() for i in range(len(first))] == expected
        for i in used:
            expected[i] += not skip
        taken.take(used, None if skip is None else torch.tensor([skip]))
        assert [taken.counts[i].item() for i in range(len(first))] == expected


def test_parameters_updated_together_share_a_count_that_stays_where_it_is() -> None:
    taken, cpu = TakenSteps(), torch.device("cpu")
    first = [taken.begin(i, 3, cpu) for i in range(4)]
    assert len(set(map(id, first))) == 1
    for used, groups in (((0, 1, 2, 3), 1), ((0, 1), 2), ((0, 1), 2), ((2, 3), 2), ((1, 2), 4)):
        taken.part(used)
        before = dict(taken.counts)
        taken.take(used, None)
        assert all(taken.counts[i] is count for i, count in before.items())
        assert len(set(map(id, before.values()))) == groups
    assert taken.counts[3] is first[0] and taken.counts[3].item() == 5
    assert taken.begin(4, 3, cpu) is not first[0] and taken.begin(5, 3, cpu) is taken.counts[4]


def test_state_goes_both_ways_between_torchs_scaler_and_ours() -> None:
    ours, theirs = LossScaler(init_scale=2.0**7, hysteresis=3), torch.amp.GradScaler("cpu", growth_interval=17)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 2.0**7 and theirs.get_growth_interval() == 2000
    theirs.scale(torch.ones(()))
    theirs._growth_tracker.fill_(5)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict()["_growth_tracker"] == 5 and ours.state_dict()["hysteresis"] == 3
    assert not LossScaler(enabled=False).state_dict() and LossScaler(enabled=False).get_scale() == 1.0


def test_settings_can_change_between_steps() -> None:
    scaler, parameter = LossScaler(init_scale=8.0), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def step(value: float) -> float:
        scaler.scale(parameter.sum())
        parameter.grad = torch.tensor([value])
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    scaler.set_backoff_factor(0.25)
    assert step(math.inf) == 2.0 and scaler.get_backoff_factor() == 0.25
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(4.0)
    assert step(1.0) == 8.0 and (scaler.get_growth_interval(), scaler.get_growth_factor()) == (1, 4.0)
    scaler.update(64.0)
    assert scaler.get_scale() == 64.0
    losses = scaler.scale([torch.ones(()), (torch.ones(2),)])
    assert losses[0] == 64.0 and losses[1][0].tolist() == [64.0, 64.0]


def test_a_disabled_scaler_does_nothing() -> None:
    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world)
        optimizer, scaler = build_scaler_adamw(session), session.scaler(enabled=False)
        loss = session.loss()
        assert scaler.scale(loss) is loss and not scaler.is_enabled()
        loss.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values())

    comm.run_threads(1, rank)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_optimizer_over_two_models_skips_both(bad: int) -> None:
    def rank(world: World) -> list[bool]:
        models = [
            npuzero.zero(build_seeded_model(make=lambda: nn.Linear(3, 3)), plan="zero1", world=world) for _ in range(2)
        ]
        optimizer = npuzero.AdamW([p for model in models for p in model.parameters()], lr=0.1)
        before = [npuzero.full_state_dict(model, rank0_only=False)["weight"] for model in models]
        scaler = LossScaler(init_scale=8.0)
        losses = [model(torch.ones(2, 3)).square().mean() for model in models]
        scaler.scale(losses[bad] * math.inf + losses[1 - bad]).backward()
        scaler.step(optimizer)
        after = [npuzero.full_state_dict(model, rank0_only=False)["weight"] for model in models]
        return [torch.equal(*pair) for pair in zip(after, before, strict=True)]

    assert comm.run_threads(2, rank) == [[True, True]] * 2
