"""A head over many classes, sharded over data ranks, trains as a softmax over all classes, or over the sampled ones,
in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, ContractError, comm
from npuzero.comm import Mesh, World
from npuzero.parallel import ArcFace, ClassHead, CosFace
from npuzero.plan import DATA
from world.toy import EPS, build_seeded_model
from world.train import assert_same_bits, assert_states_close

CLASSES, FEATURES, BATCH, STEPS = 22, 6, 5, 3

#: The effect of each margin on the angle, by plain trigonometry.
MARGINS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "arc": (ArcFace(m=0.3, s=8.0), lambda cosine: (cosine.arccos() + 0.3).cos()),
    "cos": (CosFace(m=0.2, s=8.0), lambda cosine: cosine - 0.2),
}


class ChosenClassHead(ClassHead):
    """A head with known negatives: the same for each rank and step."""

    step = 0

    def sample(self, own: Tensor) -> Tensor:
        return choose_negatives(self.step, self.first, self.local, own, self.sample_rate)


def choose_negatives(step: int, first: int, local: int, own: Tensor, rate: float) -> Tensor:
    score = torch.rand(local, generator=torch.Generator().manual_seed(100 * step + first))
    positives = own[own >= 0].unique()
    score[positives] = 2.0
    return score.topk(max(math.ceil(rate * local), len(positives))).indices.sort().values


class ClassHeadNet(nn.Module):
    def __init__(self, head: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, FEATURES))
        self.head = head()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.body(x), y)


def class_batch(step: int, rank: int, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 8, generator=generator), torch.randint(classes, (BATCH,), generator=generator)


def class_ranges(ranks: int) -> list[tuple[int, int]]:
    """Return the first class of each rank, and the number of its classes: one more on the first ranks."""
    sizes = [CLASSES // ranks + (rank < CLASSES % ranks) for rank in range(ranks)]
    return [(sum(sizes[:rank]), sizes[rank]) for rank in range(ranks)]


def build_class_optimizer(kind: str, parameters: Any, sharded: bool = True) -> torch.optim.Optimizer:
    if kind == "adamw":
        return (npuzero.AdamW if sharded else torch.optim.AdamW)(parameters, lr=1e-2, eps=EPS)
    sgd = partial(npuzero.ZeroOptimizer, torch.optim.SGD) if sharded else torch.optim.SGD
    return sgd(parameters, lr=0.1, momentum=0.9)


def on_one_process(ranks: int, rate: float, margin: str | None, kind: str) -> dict[str, Tensor]:
    """Train by plain torch: over all classes, or over the union of the ranks' sampled rows."""
    model = build_seeded_model(
        make=lambda: ClassHeadNet(lambda: ClassHead(FEATURES, CLASSES, npuzero.mesh(world=comm.SingleWorld())))
    )
    weight, body = model.head.weight, model.body
    optimizer = build_class_optimizer(kind, model.parameters(), sharded=False)
    losses, norms = [], []
    for step in range(STEPS):
        xs, ys = (torch.cat(parts) for parts in zip(*(class_batch(step, rank) for rank in range(ranks)), strict=True))
        rows = torch.arange(CLASSES)
        if rate < 1:
            parts = []
            for first, local in class_ranges(ranks):
                own = torch.where((ys >= first) & (ys < first + local), ys - first, -1)
                parts.append(first + choose_negatives(step, first, local, own, rate))
            rows = torch.cat(parts)
        x, w, y = body(xs), weight[rows], torch.searchsorted(rows, ys)
        if margin is None:
            logits = x @ w.T
        else:
            cosines = F.normalize(x) @ F.normalize(w).T
            logits = 8 * torch.where(F.one_hot(y, len(rows)) > 0, MARGINS[margin][1](cosines), cosines)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        losses.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.detach() for name, value in model.named_parameters()}
    return {**state, "losses": torch.stack(losses), "norms": torch.stack(norms)}


def train_class_head_rank(
    world: World, plan: str, rate: float, margin: str | None, kind: str, tensor: int
) -> dict[str, Tensor]:
    mesh = npuzero.mesh(tensor=tensor, local_size=2 if world.size // tensor == 4 else None, world=world)
    given = {"sample_rate": rate, "margin": MARGINS[margin][0] if margin else None}
    model = build_seeded_model(make=lambda: ClassHeadNet(lambda: ChosenClassHead(FEATURES, CLASSES, mesh, **given)))
    assert (model.head.first, model.head.local) == class_ranges(mesh.size(DATA))[mesh.index(DATA)]
    npuzero.parallel.relate(model, tensor="repeated")
    npuzero.zero(model, plan=plan, mesh=mesh)
    optimizer = build_class_optimizer(kind, model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        model.head.step = step
        loss = model(*class_batch(step, mesh.index(DATA)))
        loss.backward()
        losses.append(loss.detach())
        norms.append(npuzero.clip_grad_norm_(model, 0.5).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    state = npuzero.full_state_dict(model, rank0_only=False)
    report, predicted = (
        npuzero.report(model),
        npuzero.predict(model, plan, mesh, clip=True, moments=2 * (kind == "adamw")),
    )
    if kind == "adamw":
        assert report.bytes_held == predicted.bytes_held
    assert (report.bytes_sent, report.sent_along) == (predicted.bytes_sent, predicted.sent_along)
    return {**state, "losses": torch.stack(losses), "norms": torch.stack(norms)}


def check_class_head(
    ranks: int, plan: str, rate: float, margin: str | None, kind: str = "sgd", tensor: int = 1
) -> None:
    found = comm.run_threads(
        ranks * tensor, lambda world: train_class_head_rank(world, plan, rate, margin, kind, tensor)
    )
    for state in found:
        assert_same_bits(state, found[0])
    assert_states_close(found[0], on_one_process(ranks, rate, margin, kind), 1e-6 if kind == "sgd" else 1e-4)


@pytest.mark.parametrize("rate", (1.0, 0.3))
@pytest.mark.parametrize(
    ("ranks", "plan", "margin", "kind"),
    [
        (1, "zero0", "arc", "sgd"),
        (2, "zero2", None, "sgd"),
        (2, "zero3", "arc", "adamw"),
        (3, "zero0", "cos", "sgd"),
        (3, "zero3", "arc", "sgd"),
        (4, "hpz", None, "adamw"),
    ],
)
def test_it_trains_as_one_process(ranks: int, plan: str, rate: float, margin: str | None, kind: str) -> None:
    """Also if classes do not divide evenly; sampled: on the same rows; a rank's positives may exceed its quota."""
    check_class_head(ranks, plan, rate, margin, kind)


@pytest.mark.parametrize("rate", (1.0, 0.3))
def test_tensor_ranks_repeat_it(rate: float) -> None:
    check_class_head(2, "zero2", rate, "cos", tensor=2)


def test_tensor_ranks_sample_alike() -> None:
    """In spite of the generators' states: here all threads share one generator, and draw different numbers."""

    def body(world: World) -> Tensor:
        mesh = npuzero.mesh(tensor=3, world=world)
        return ClassHead(FEATURES, 1000, mesh, sample_rate=0.1).sample(torch.tensor([3, 7, -1]))

    first, *others = comm.run_threads(3, body)
    assert len(first) == 100 and {3, 7} <= {*first.tolist()}
    assert all(first.equal(rows) for rows in others)


def one_rank_mesh() -> Mesh:
    return npuzero.mesh(world=comm.SingleWorld("cpu"))


def test_positives_come_first_and_negatives_up_to_the_quota() -> None:
    head = ClassHead(FEATURES, 50, one_rank_mesh(), sample_rate=0.1)
    for own, size in (
        ([7, 7, 9, -1], 5),
        ([-1, -1], 5),
        ([*range(10, 20), 10], 10),
        ([1, 2, 3, 4, 5], 5),
        ([1] * 9, 5),
    ):
        rows = head.sample(torch.tensor(own))
        assert rows.tolist() == sorted({*rows.tolist()}) and len(rows) == size
        assert {*own} - {-1} <= {*rows.tolist()}
        assert rows.min() >= 0 and rows.max() < 50
    assert len({tuple(head.sample(torch.tensor([0])).tolist()) for _ in range(20)}) > 10


@pytest.mark.parametrize("plan", ("zero0", "zero3"))
def test_on_meta_it_begins_with_the_same_centres(plan: str) -> None:
    """Each rank has its share of the classes, even or uneven."""

    def body(world: World) -> None:
        mesh = npuzero.mesh(world=world)

        def on_meta() -> ClassHead:
            with torch.device("meta"):
                return ClassHead(4, CLASSES, mesh)

        def fill(module: nn.Module) -> None:
            if isinstance(module, ClassHead):
                module.weight.copy_(whole)

        with torch.no_grad():
            head = npuzero.zero(on_meta(), plan, mesh=mesh, initialize=fill)
        assert head.weight.shape == (8, 4)
        assert npuzero.full_state_dict(head, rank0_only=False)["weight"].equal(whole)
        head(torch.randn(2, 4), torch.tensor([0, 21])).backward()
        own = head(torch.zeros(2, 4), torch.tensor([0, 21]))
        assert abs(own.item() - math.log(CLASSES)) < 1e-5

    whole = torch.randn(CLASSES, 4)
    comm.run_threads(3, body)


@pytest.mark.parametrize(("saved", "loaded"), ((3, 2), (2, 3), (1, 3)))
def test_checkpoints_load_on_another_number_of_ranks(saved: int, loaded: int, tmp_path: Path) -> None:
    """Centres and their moments, with classes that do not divide evenly."""

    def made(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = npuzero.mesh(world=world)
        model = build_seeded_model(make=lambda: ClassHeadNet(lambda: ClassHead(FEATURES, CLASSES, mesh)))
        npuzero.zero(model, "zero2", mesh=mesh)
        return model, build_class_optimizer("adamw", model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, world: World) -> None:
        x, y = (torch.cat(parts) for parts in zip(*(class_batch(number, rank) for rank in range(6)), strict=True))
        model(x.chunk(world.size)[world.rank], y.chunk(world.size)[world.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(world: World) -> dict[str, Tensor]:
        model, optimizer = made(world)
        step(model, optimizer, 0, world)
        npuzero.checkpoint.save(tmp_path / "checkpoint", model, optimizer, step=1)
        step(model, optimizer, 1, world)
        return npuzero.full_state_dict(model, rank0_only=False)

    def load(world: World) -> dict[str, Tensor]:
        model, optimizer = made(world)
        assert npuzero.checkpoint.load(tmp_path / "checkpoint", model, optimizer).step == 1
        step(model, optimizer, 1, world)
        return npuzero.full_state_dict(model, rank0_only=False)

    expected, found = (comm.run_threads(ranks, fn)[0] for ranks, fn in ((saved, save), (loaded, load)))
    assert expected["head.weight"].shape == (CLASSES, FEATURES)
    assert_states_close(found, expected, 1e-5)


def test_exported_weights_are_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    def made(world: World, seed: int, **given: Any) -> dict[str, Tensor]:
        mesh = npuzero.mesh(world=world)
        model = build_seeded_model(seed, make=lambda: ClassHeadNet(lambda: ClassHead(FEATURES, CLASSES, mesh)))
        npuzero.zero(model, "zero3", mesh=mesh, **given)
        if not given:
            npuzero.export(model, tmp_path / "weights")
        return npuzero.full_state_dict(model, rank0_only=False)

    expected = comm.run_threads(3, lambda world: made(world, 1))[0]
    for found in comm.run_threads(4, lambda world: made(world, 2, weights=tmp_path / "weights")):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("margin", (None, CosFace()))
def test_sampling_lowers_the_logits_memory_to_its_rate(margin: Any) -> None:
    """Return the bytes that autograd saves in a step, without centres and features."""

    def kept(rate: float) -> int:
        head, sizes = ClassHead(4, 10_000, one_rank_mesh(), sample_rate=rate, margin=margin), {}

        def keep(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            head(torch.randn(64, 4), torch.arange(64))
        return max(sizes.values())

    assert kept(1.0) == 10_000 * 64 * 4
    assert kept(0.1) == 1_000 * 64 * 4


def test_all_classes_take_part_in_evaluation() -> None:
    whole, sampled = (
        build_seeded_model(make=lambda r=rate: ClassHead(4, 100, one_rank_mesh(), sample_rate=r)).eval()
        for rate in (1.0, 0.1)
    )
    x, y = torch.randn(8, 4), torch.arange(8)
    assert sampled(x, y).equal(whole(x, y))


def test_half_precision_has_a_float32_loss() -> None:
    head = ClassHead(8, 100, one_rank_mesh(), margin=ArcFace(), dtype=torch.bfloat16)
    x = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    loss = head(x, torch.arange(8))
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.isfinite().all() and head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("margin", (ArcFace(), CosFace()))
def test_margins_lower_every_cosine_and_have_finite_slopes(margin: Any) -> None:
    cosines = torch.cat([torch.linspace(-1, 1, 201), torch.tensor([1 + 1e-7])]).requires_grad_()
    found = margin(cosines)
    found.sum().backward()
    assert (found < cosines).all() and (found[:201].diff() > -1e-6).all()
    assert cosines.grad.isfinite().all()


MADE: dict[str, tuple[dict[str, Any], str]] = {
    "features": ({"features": 0}, "ClassHead: features"),
    "classes": ({"classes": 1}, "one or more for each of 2 data ranks; got 1"),
    "sample_rate": ({"sample_rate": 0.0}, "in (0, 1]"),
    "a rate in percent": ({"sample_rate": 10}, "in (0, 1]"),
    "margin": ({"margin": 0.5}, "ArcFace, CosFace"),
}
CALLED: dict[str, tuple[Tensor, Tensor, str]] = {
    "feature": (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), "[b, 6]"),
    "labels": (torch.zeros(2, 6), torch.zeros(3, dtype=torch.int64), "(2,) int64"),
    "dtype": (torch.zeros(2, 6), torch.zeros(2), "got (2,) float32"),
    "class": (torch.zeros(2, 6), torch.tensor([0, 22]), "0 to 21; got 22"),
    "negative": (torch.zeros(2, 6), torch.tensor([-100, 1]), "0 to 21; got -100"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_head_that_cannot_work_is_refused_on_every_rank(name: str) -> None:
    def body(world: World) -> None:
        given, text = MADE[name]
        with pytest.raises(ConfigError) as refused:
            ClassHead(**{"features": 6, "classes": 22, "mesh": npuzero.mesh(world=world), **given})
        assert text in str(refused.value)

    comm.run_threads(2, body)


@pytest.mark.parametrize("name", CALLED)
def test_a_batch_that_does_not_fit_is_refused_on_every_rank(name: str) -> None:
    """Also if only rank 0 has a label outside the classes."""

    def body(world: World) -> None:
        features, labels, text = CALLED[name]
        if "0 to 21" in text and world.rank:
            labels = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(ContractError) as refused:
            ClassHead(6, 22, npuzero.mesh(world=world))(features, labels)
        assert text in str(refused.value)

    comm.run_threads(2, body)
