"""Optimizers over sharded models, and npuzero's own over plain ones, compared with torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.toy import EPS, ToyGPT, TrainingRecipe, build_seeded_model, toy_loss, toy_param_groups, toy_tokens
from world.train import (
    CutSession,
    PlainSession,
    Session,
    State,
    assert_same_bits,
    assert_states_close,
    check_equals_plain,
    relative_difference,
    run_cut,
    train_by_recipe,
)

PLANS = ("zero0", "zero1", "zero3", "hsdp")

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "betas": (0.8, 0.95)}),
    "AdamW, maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True, "eps": 1e-4}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
}
FUSED = ("Adam", "AdamW, amsgrad", "AdamW, maximize")


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Return every tensor and number of the state by ``number.name``, and every option by ``group.option``.

    Leave out the states that some of torch's optimizers keep of frozen parameters.
    """
    saved = optimizer.state_dict()
    trains = [parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        f"state {number}.{name}": torch.as_tensor(value).detach().clone()
        for number, values in saved["state"].items()
        for name, value in values.items()
        if trains[number]
    }
    for i, group in enumerate(saved["param_groups"]):
        numbers = {key: value for key, value in group.items() if isinstance(value, (int, float, list, tuple))}
        state |= {f"group {i}.{key}": torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
    return state


def run_optimizer_steps(session: Session, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def parametrize_kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", names)


# -- every element-wise optimizer --------------------------------------------------------------------------------------


@pytest.mark.checkered
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fused", [False, True], ids=["over shards", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers(kind: str, fused: bool, plan: str) -> None:
    if fused and kind not in FUSED:
        pytest.skip("has no fused form")
    check_equals_plain(_training_by(kind, fused), 4, plan=plan, local_size=2)


_scenarios: dict[tuple[str, bool], Callable[[Session], State]] = {}


def _training_by(kind: str, fused: bool) -> Callable[[Session], State]:
    """Train with clipping; return the final state. Each optimizer has one object, so that the oracle runs once."""

    def scenario(session: Session) -> State:
        optimizer_class, options = KINDS[kind]
        optimizer = session.optimizer(optimizer_class, fused=fused, **options)
        for step in range(3):
            session.loss(step).backward()
            session.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer_state(optimizer)

    return _scenarios.setdefault((kind, fused), scenario)


# -- schedules and groups ----------------------------------------------------------------------------------------------


def one_cycle(session: Session) -> State:
    """Change the learning rate and the first beta at every step."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)
    for step in range(5):
        run_optimizer_steps(session, optimizer, step, step + 1)
        schedule.step()
    return optimizer_state(optimizer)


def warm_up(session: Session) -> State:
    params = toy_param_groups(session.model, TrainingRecipe(groups=True))
    optimizer = session.optimizer(torch.optim.SGD, params, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: step / 4, lambda step: 0.5**step])
    for step in range(4):
        run_optimizer_steps(session, optimizer, step, step + 1)
        schedule.step()
    return optimizer_state(optimizer)


def two_optimizers(session: Session) -> State:
    """Each over a part of the model, stepped and zeroed at its own pace."""
    inner = [p for name, p in session.model.named_parameters() if name.startswith("blocks")]
    outer = [p for name, p in session.model.named_parameters() if not name.startswith("blocks")]
    fast = session.optimizer(torch.optim.AdamW, inner, lr=1e-2)
    slow = session.optimizer(torch.optim.SGD, outer, lr=1e-1)
    for step in range(4):
        session.loss(step).backward()
        fast.step()
        fast.zero_grad()
        if step % 2:
            slow.step()
            slow.zero_grad()
    return {}


def a_group_that_is_added(session: Session) -> State:
    inner = [p for name, p in session.model.named_parameters() if name.startswith("blocks")]
    outer = [p for name, p in session.model.named_parameters() if not name.startswith("blocks")]
    optimizer = session.optimizer(torch.optim.AdamW, inner, lr=1e-2)
    run_optimizer_steps(session, optimizer, 0, 2)
    optimizer.add_param_group({"params": outer, "lr": 1e-3, "weight_decay": 0.0})
    run_optimizer_steps(session, optimizer, 2, 4)
    return optimizer_state(optimizer)


def a_group_that_is_added_to_sgd(session: Session) -> State:
    inner = [p for name, p in session.model.named_parameters() if name.startswith("blocks")]
    outer = [p for name, p in session.model.named_parameters() if not name.startswith("blocks")]
    optimizer = session.optimizer(torch.optim.SGD, inner, lr=1e-1, momentum=0.9)
    run_optimizer_steps(session, optimizer, 0, 2)
    optimizer.add_param_group({"params": outer, "lr": 1e-2})
    run_optimizer_steps(session, optimizer, 2, 4)
    return optimizer_state(optimizer)


def a_part_of_the_model(session: Session) -> State:
    """A parameter outside the optimizer does not change, and still counts for clipping."""
    optimizer = session.optimizer(torch.optim.AdamW, session.model.blocks[1].parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        session.loss(step).backward()
        norms.append(session.clip(0.1))
        optimizer.step()
        session.model.zero_grad()
    return optimizer_state(optimizer) | {"norms": torch.stack(norms)}


def a_learning_rate_that_is_a_tensor(session: Session) -> State:
    optimizer = session.optimizer(torch.optim.AdamW, lr=torch.tensor(1e-2))
    run_optimizer_steps(session, optimizer, 0, 2)
    optimizer.param_groups[0]["lr"].fill_(1e-3)
    run_optimizer_steps(session, optimizer, 2, 4)
    return {}


def saved_and_loaded(session: Session) -> State:
    """Go on, go back to what was saved, go on again."""
    optimizer = session.optimizer(
        torch.optim.AdamW, toy_param_groups(session.model, TrainingRecipe(groups=True)), lr=1e-2
    )
    run_optimizer_steps(session, optimizer, 0, 2)
    weights, states = session.state(), copy.deepcopy(optimizer.state_dict())
    run_optimizer_steps(session, optimizer, 2, 4)
    session.load(weights)
    again = session.optimizer(torch.optim.AdamW, toy_param_groups(session.model, TrainingRecipe(groups=True)), lr=0.5)
    again.load_state_dict(states)
    run_optimizer_steps(session, again, 4, 6)
    return optimizer_state(again)


def saved_and_loaded_sgd(session: Session) -> State:
    optimizer = session.optimizer(torch.optim.SGD, lr=1e-1, momentum=0.9)
    run_optimizer_steps(session, optimizer, 0, 2)
    weights, states = session.state(), copy.deepcopy(optimizer.state_dict())
    run_optimizer_steps(session, optimizer, 2, 4)
    session.load(weights)
    optimizer.load_state_dict(states)
    run_optimizer_steps(session, optimizer, 4, 6)
    return optimizer_state(optimizer)


def hooks_of_an_optimizer(session: Session) -> State:
    """Called as torch calls them."""
    called = []
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: called.append(1.0))
    optimizer.register_step_post_hook(lambda *_: called.append(2.0))
    run_optimizer_steps(session, optimizer, 0, 2)
    return {"called": torch.tensor(called)}


SCENARIOS = (
    one_cycle,
    warm_up,
    two_optimizers,
    a_group_that_is_added,
    a_group_that_is_added_to_sgd,
    a_part_of_the_model,
    a_learning_rate_that_is_a_tensor,
    saved_and_loaded,
    saved_and_loaded_sgd,
    hooks_of_an_optimizer,
)


@pytest.mark.checkered
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.replace("_", " "))
def test_schedules_groups_and_states(scenario: Callable[[Session], State], plan: str) -> None:
    check_equals_plain(scenario, 4, plan=plan, local_size=2)


# -- a state may move between torch and npuzero ------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_training_moves_to_torch_and_back(plan: str) -> None:
    """Two steps here, two by plain torch from the saved state, two here again."""

    def moving(world: World) -> State:
        session = CutSession(build_seeded_model(), world, plan=plan, local_size=2)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        run_optimizer_steps(session, optimizer, 0, 2)
        plain = PlainSession(build_seeded_model(seed=1), range(world.size), world.size)
        theirs = plain.optimizer(torch.optim.AdamW, lr=1.0)
        plain.load(session.state())
        theirs.load_state_dict(optimizer.state_dict())
        run_optimizer_steps(plain, theirs, 2, 4)
        session.load(plain.state())
        optimizer.load_state_dict(theirs.state_dict())
        run_optimizer_steps(session, optimizer, 4, 6)
        return session.state()

    state = comm.run_threads(4, moving)[0]
    expected = PlainSession(build_seeded_model(), range(4), 4)
    run_optimizer_steps(expected, expected.optimizer(torch.optim.AdamW, lr=1e-2), 0, 6)
    assert_states_close(state, expected.state())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_an_optimizer_may_be_built_before_the_model_is_cut(plan: str, kind: str) -> None:
    optimizer_class, options = KINDS[kind]

    def early(world: World) -> State:
        model = build_seeded_model()
        fused = npuzero.Adam if kind == "Adam" else None
        optimizer = (
            fused(model.parameters(), **options)
            if fused
            else npuzero.ZeroOptimizer(optimizer_class, model.parameters(), **options)
        )
        npuzero.zero(model, plan=plan, local_size=2, world=world)
        for step in range(3):
            toy_loss(model, toy_tokens(step, 0, world.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(model, rank0_only=False)

    expected = PlainSession(build_seeded_model(), range(4), 4)
    run_optimizer_steps(expected, optimizer_class(expected.model.parameters(), **options), 0, 3)
    assert_states_close(comm.run_threads(4, early)[0], expected.state())


# -- without zero(): a drop-in for torch's -----------------------------------------------------------------------------

DROP_IN: dict[str, dict[str, Any]] = {
    "plain": {"lr": 1e-2},
    "amsgrad": {"lr": 1e-2, "amsgrad": True},
    "maximize": {"lr": 1e-3, "maximize": True},
    "lr tensor": {"lr": torch.tensor(1e-2)},
    "betas, eps, decay": {"lr": 1e-2, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.3},
}


@pytest.mark.parametrize("plan", PLANS)
def test_torchs_optimizers_train_low_precision_by_masters(plan: str) -> None:
    """Equal to npuzero's own form, up to the rounding of masters."""

    def trained(fused: bool) -> Callable[[Session], None]:
        return lambda session: run_optimizer_steps(
            session, session.optimizer(torch.optim.AdamW, lr=0.1, fused=fused), 0, 1
        )

    over_shards, own = (
        run_cut(trained(fused), 2, plan=plan, local_size=1, precision="bf16")[0] for fused in (False, True)
    )
    assert_states_close(over_shards, own, 2.0**-7)
    before = build_seeded_model().tokens.weight.detach().bfloat16()
    assert relative_difference(over_shards["tokens.weight"], before) > 2.0**-7


@pytest.mark.parametrize("ours, theirs", [(npuzero.AdamW, torch.optim.AdamW), (npuzero.Adam, torch.optim.Adam)])
@pytest.mark.parametrize("options", DROP_IN.values(), ids=DROP_IN)
def test_drop_in(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    outcomes = []
    for optimizer_class in (ours, theirs):
        session = PlainSession(build_seeded_model(), range(2), 2)
        optimizer = optimizer_class(toy_param_groups(session.model, TrainingRecipe(groups=True)), **options)
        run_optimizer_steps(session, optimizer, 0, 4)
        saved = optimizer.state_dict()
        optimizer = optimizer_class(toy_param_groups(session.model, TrainingRecipe(groups=True)), **options)
        optimizer.load_state_dict(saved)
        run_optimizer_steps(session, optimizer, 4, 6)
        outcomes.append(session.state() | optimizer_state(optimizer))
    assert_states_close(*outcomes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drop_in_keeps_masters_for_low_precision(dtype: torch.dtype) -> None:
    """The parameter is the rounded float32 master; torch's own update would round after every operation."""
    low = nn.Parameter(torch.randn(33, 7).to(dtype))
    master = nn.Parameter(low.detach().float())
    ours, theirs = npuzero.AdamW([low], lr=1e-3), torch.optim.AdamW([master], lr=1e-3)
    for step in range(20):
        low.grad = torch.randn(33, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        master.grad = low.grad.float()
        ours.step()
        theirs.step()
    half_ulp = torch.finfo(dtype).eps / 2
    assert relative_difference(ours.state[low]["master"], master.detach()) < 1e-6
    assert ((low.float() - master).abs() <= half_ulp * master.abs() * 1.01 + 1e-7).all()


def test_a_drop_in_leaves_the_state_it_was_loaded_from_alone() -> None:
    """So that one state can be tried with several rates."""
    parameter = nn.Parameter(torch.ones(5))
    parameter.grad = torch.ones(5)
    optimizer = npuzero.AdamW([parameter])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state["state"][0])
    optimizer.load_state_dict(state)
    optimizer.step()
    assert_same_bits(state["state"][0], kept)


def test_drop_in_takes_what_torch_takes() -> None:
    """Scalars, nothing at all, transposed parameters, gradients that are not there."""
    parameters = [
        nn.Parameter(value) for value in (torch.tensor(2.0), torch.zeros(0, 3), torch.randn(4, 6).t(), torch.randn(5))
    ]
    copies = [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in parameters]
    for kind, members in ((npuzero.AdamW, parameters), (torch.optim.AdamW, copies)):
        optimizer = kind(members, lr=1e-2)
        for step in range(3):
            for p in members[: 3 + step % 2]:
                p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    for ours, theirs in zip(parameters, copies, strict=True):
        assert relative_difference(ours.detach(), theirs.detach()) < 1e-6
        assert ours.stride() == theirs.stride()


def test_drop_in_sees_what_changes_between_steps() -> None:
    """Buffers that moved, states that were loaded, a later group, a parameter left out for a while."""
    torch.manual_seed(0)
    starts = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2)]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(6)]
    trained = []
    for kind in (npuzero.AdamW, torch.optim.AdamW):
        members = [nn.Parameter(start.clone()) for start in starts]
        optimizer = kind(members[:2], lr=1e-2)
        for step, values in enumerate(gradients):
            if step == 1:
                members[0].data = members[0].data.clone()
            elif step == 2:
                optimizer.add_param_group({"params": [members[2]], "lr": 1e-1})
            elif step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
            elif step == 5:
                optimizer.load_state_dict(saved)
            for i, (p, value) in enumerate(zip(members, values, strict=True)):
                p.grad = None if (i, step) == (1, 3) else value.clone()
            optimizer.step()
        for value in (value for state in optimizer.state_dict()["state"].values() for value in state.values()):
            assert value.untyped_storage().nbytes() == value.nbytes
        trained.append({str(i): p.detach() for i, p in enumerate(members)} | optimizer_state(optimizer))
    ours, theirs = trained
    for name in (name for name in theirs if not name.startswith("group")):
        assert relative_difference(ours[name], theirs[name]) < 1e-6, name


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
@pytest.mark.parametrize("options", ({}, {"capturable": True}, {"masters": "split", "moments": "int8"}, None))
def test_a_copy_goes_on_like_the_optimizer(copied: Callable[[Any], Any], options: dict[str, Any] | None) -> None:
    """With additional attributes, as torch's; None: those of SGD."""
    torch.manual_seed(0)
    members = [nn.Parameter(torch.randn(3, 4).bfloat16()), nn.Parameter(torch.randn(5))]
    before = (
        npuzero.ZeroOptimizer(torch.optim.SGD, members, lr=1e-2, momentum=0.9)
        if options is None
        else npuzero.AdamW(members, lr=1e-2, **options)
    )

    def go_on(optimizer: torch.optim.Optimizer, seed: int) -> State:
        torch.manual_seed(seed)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        optimizer.step()
        return {str(i): p.detach().clone() for i, p in enumerate(optimizer.param_groups[0]["params"])}

    first = go_on(before, 1)
    after = copied(before)
    assert_same_bits({str(i): p.detach() for i, p in enumerate(members)}, first)
    expected = go_on(before, 2)
    assert_same_bits(go_on(after, 2), expected)
    assert_same_bits({str(i): p.detach() for i, p in enumerate(members)}, expected)


def test_training_in_a_plain_world_needs_no_zero() -> None:
    session = PlainSession(build_seeded_model(), [0], 1)
    ours = npuzero.AdamW(session.model.parameters(), lr=1e-2, eps=EPS)
    run_optimizer_steps(session, ours, 0, 3)
    reference = PlainSession(build_seeded_model(make=ToyGPT), [0], 1)
    train_by_recipe(reference, TrainingRecipe(steps=3))
    assert_states_close(session.state(), reference.state())
