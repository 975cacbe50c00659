"""npuzero's optimizers in place of torch's, over plain parameters: arguments, refusals, states, and writes of programs
to parameters between steps."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError
from npuzero.comm import SingleWorld
from world.train import relative_difference

PAIRS = {"AdamW": (npuzero.AdamW, torch.optim.AdamW), "Adam": (npuzero.Adam, torch.optim.Adam)}
both = pytest.mark.parametrize("ours, theirs", PAIRS.values(), ids=PAIRS)


def matrix_and_vector() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]


def set_random_gradients(members: list[nn.Parameter], seed: int) -> None:
    """The same values for any layout and dtype, laid out as autograd does."""
    generator = torch.Generator().manual_seed(seed)
    for p in members:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


# -- arguments ---------------------------------------------------------------------------------------------------------


@both
def test_the_signature_is_torchs(ours: Any, theirs: Any) -> None:
    """Programs check whether it has ``fused``, and pass arguments by position."""
    mine, torchs = (inspect.signature(kind).parameters for kind in (ours, theirs))
    for name, parameter in torchs.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)
    positional = [name for name, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [*mine][: len(positional)] == positional
    assert ours(matrix_and_vector()).defaults == theirs(matrix_and_vector()).defaults


REFUSED: dict[str, Callable[[Any], object]] = {
    "a tensor": lambda kind: kind(torch.ones(3)),
    "a parameter": lambda kind: kind(matrix_and_vector()[0]),
    "nothing": lambda kind: kind([]),
    "None": lambda kind: kind(None),
    "a module": lambda kind: kind(nn.Linear(2, 2)),
    "numbers": lambda kind: kind([1, 2]),
    "names": lambda kind: kind(["weight"]),
    "a group that is not in a list": lambda kind: kind({"params": matrix_and_vector()}),
    "a group without parameters": lambda kind: kind([{"lr": 1.0}]),
    "groups and parameters": lambda kind: kind([{"params": matrix_and_vector()}, matrix_and_vector()[0]]),
    "parameters and groups": lambda kind: kind([matrix_and_vector()[0], {"params": matrix_and_vector()}]),
    "a set in a group": lambda kind: kind([{"params": set(matrix_and_vector())}]),
    "what is computed": lambda kind: kind([matrix_and_vector()[0] * 2]),
    "names for some": lambda kind: kind([("weight", matrix_and_vector()[0]), matrix_and_vector()[1]]),
    "one parameter in two groups": lambda kind: kind([{"params": (p := matrix_and_vector())}, {"params": p}]),
    "lr of text": lambda kind: kind(matrix_and_vector(), lr="1e-3"),
    "lr of None": lambda kind: kind(matrix_and_vector(), lr=None),
    "lr below zero": lambda kind: kind(matrix_and_vector(), lr=-1.0),
    "lr of two elements": lambda kind: kind(matrix_and_vector(), lr=torch.ones(2)),
    "one beta": lambda kind: kind(matrix_and_vector(), betas=(0.9,)),
    "betas of a number": lambda kind: kind(matrix_and_vector(), betas=0.9),
    "a beta of 1": lambda kind: kind(matrix_and_vector(), betas=(0.9, 1.0)),
    "an integer beta": lambda kind: kind(matrix_and_vector(), betas=(0, 0.9)),
    "eps below zero": lambda kind: kind(matrix_and_vector(), eps=-1.0),
    "weight decay of None": lambda kind: kind(matrix_and_vector(), weight_decay=None),
    "foreach and fused": lambda kind: kind(matrix_and_vector(), foreach=True, fused=True),
    "an unknown option": lambda kind: kind(matrix_and_vector(), learning_rate=1.0),
    "too many by position": lambda kind: kind(matrix_and_vector(), 1e-3, (0.9, 0.999), 1e-8, 0.0, False, False),
    "no parameters at all": lambda kind: kind(),
    "a later group that is a list": lambda kind: kind(matrix_and_vector()).add_param_group(matrix_and_vector()),
    "a later group of parameters it has": lambda kind: kind(p := matrix_and_vector()).add_param_group({"params": p}),
}


@both
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_by_the_same_error(
    refused: Callable[[Any], object], ours: Any, theirs: Any
) -> None:
    mine, torchs = (caught_exception(refused, kind) for kind in (ours, theirs))
    assert isinstance(mine, type(torchs))
    if not str(torchs).startswith(theirs.__name__):  # else Python's own, about the signature
        assert isinstance(mine, ConfigError) and str(torchs).strip("'") in str(mine)
        again = pickle.loads(pickle.dumps(mine))
        assert isinstance(again, type(torchs)) and isinstance(again, ConfigError) and str(again) == str(mine)


def caught_exception(refused: Callable[[Any], object], kind: Any) -> Exception:
    try:
        refused(kind)
    except Exception as error:
        return error
    raise AssertionError(f"{kind} takes it")


@pytest.mark.parametrize("where", ["argument", "group", "loaded"])
@pytest.mark.parametrize("ours, theirs", PAIRS.values(), ids=PAIRS)
def test_weight_decay_is_decoupled_where_torch_decouples_it(where: str, ours: Any, theirs: Any) -> None:
    outcomes = []
    for kind in (ours, theirs):
        members = matrix_and_vector()
        chosen = (
            {"decoupled_weight_decay": True} if "decoupled_weight_decay" in inspect.signature(kind).parameters else {}
        )
        if where == "argument":
            optimizer = kind(members, lr=0.1, weight_decay=0.5, **chosen)
        elif where == "group":
            optimizer = kind([{"params": members[:1], **chosen}, {"params": members[1:]}], lr=0.1, weight_decay=0.5)
        else:
            other = torch.optim.Adam(
                matrix_and_vector(), lr=0.1, weight_decay=0.5, **({} if kind in PAIRS["AdamW"] else chosen)
            )
            optimizer = kind(members)
            optimizer.load_state_dict(other.state_dict())
        for step in range(3):
            set_random_gradients(members, step)
            optimizer.step()
        outcomes.append(members)
    for mine, torchs in zip(*outcomes, strict=True):
        assert relative_difference(mine.detach(), torchs.detach()) < 1e-6


# -- in torch's place --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_torchs_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[torch.optim.Optimizer]]:
    """Assign ``torch.optim.AdamW = npuzero.AdamW``, as a program does that redirects a library's optimizers."""
    torchs = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", npuzero.AdamW)
    monkeypatch.setattr(torch.optim, "Adam", npuzero.Adam)
    yield torchs


class WarmingOptimizer:
    """A subclass that a library makes of the AdamW it finds."""

    calls = 0

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)  # type: ignore[misc]


def test_npuzeros_in_torchs_place(in_torchs_place: type[torch.optim.Optimizer]) -> None:
    members, others = matrix_and_vector(), matrix_and_vector()
    subclass: Any = type("WarmingAdamW", (WarmingOptimizer, torch.optim.AdamW), {})
    optimizer = subclass(members, 1e-2, (0.8, 0.9), foreach=True)
    theirs = in_torchs_place(others, 1e-2, (0.8, 0.9), foreach=True)
    for step in range(3):
        for kind, params in ((optimizer, members), (theirs, others)):
            set_random_gradients(params, step)
            kind.step()
    assert optimizer.calls == 3 and isinstance(optimizer, torch.optim.AdamW)
    for mine, torchs in zip(members, others, strict=True):
        assert relative_difference(mine.detach(), torchs.detach()) < 1e-6
    for copied in (
        copy.deepcopy(optimizer),
        torch.optim.Adam(matrix_and_vector()),
        torch.optim.AdamW(matrix_and_vector()),
    ):
        copied.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        set_random_gradients([p for group in copied.param_groups for p in group["params"]], 0)
        copied.step()
        assert copied.state_dict()["state"][2]["step"] == 1
    theirs.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(theirs.state_dict())


def test_transformers_finds_it_in_torchs_place(in_torchs_place: object, tmp_path: Any) -> None:
    """Imported before or after: it looks AdamW up at use."""
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(str(tmp_path), optim="adamw_torch_fused", use_cpu=True, report_to=[])
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert kind is npuzero.AdamW
    kind(matrix_and_vector(), **options)


# -- states ------------------------------------------------------------------------------------------------------------


def memory_layouts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(4, 3, 5, 5, generator=generator) for name in ("contiguous", "channels last", "transposed")
    }
    values["channels last"] = values["channels last"].to(memory_format=torch.channels_last)
    values["transposed"] = values["transposed"].transpose(0, 1)
    return values


@pytest.mark.parametrize(
    "how", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "for"]
)
@pytest.mark.parametrize("layout", memory_layouts())
@pytest.mark.parametrize("amsgrad", [False, True])
def test_states_of_any_layout_go_to_torch_and_back(layout: str, how: dict[str, bool], amsgrad: bool) -> None:
    start = memory_layouts()[layout]
    options = {"lr": 1e-2, "amsgrad": amsgrad}
    moved, stayed = (nn.Parameter(start.clone(memory_format=torch.preserve_format)) for _ in range(2))
    reference = torch.optim.AdamW([stayed], **options)
    optimizer: torch.optim.Optimizer | None = None
    for leg, kind in enumerate((torch.optim.AdamW, npuzero.AdamW, torch.optim.AdamW, npuzero.AdamW)):
        state = optimizer and copy.deepcopy(optimizer.state_dict())
        optimizer = kind([moved], **options, **how)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(2):
            for p, each in ((moved, optimizer), (stayed, reference)):
                set_random_gradients([p], 2 * leg + step)
                each.step()
        found, expected = optimizer.state_dict()["state"][0], reference.state_dict()["state"][0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert relative_difference(found[name], value) < 1e-5
            assert found[name].stride() == value.stride(), name
    assert moved.stride() == start.stride()
    assert relative_difference(moved.detach(), stayed.detach()) < 1e-5


# -- writing parameters ------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "nn.init": lambda p: nn.init.constant_(p, 0.375),
    "copy_": lambda p: p.detach().copy_(torch.full_like(p, -0.5)),
    "clamp_": lambda p: p.detach()[1:].clamp_(-0.25, 0.25),
    "an average": lambda p: p.detach().lerp_(torch.ones_like(p), 0.5),
    "other memory": lambda p: setattr(p, "data", torch.full_like(p.data, 0.75)),
}
KEPT: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "bf16, split": (torch.bfloat16, {"masters": "split"}),
    "bf16, none": (torch.bfloat16, {"masters": "none"}),
}


@pytest.mark.parametrize("layout", memory_layouts())
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_between_steps_lasts(
    write: Callable[[nn.Parameter], object], kept: tuple[torch.dtype, dict[str, Any]], layout: str
) -> None:
    dtype, options = kept
    p, other = nn.Parameter(memory_layouts()[layout].to(dtype)), nn.Parameter(torch.ones(3).to(dtype))
    optimizer = npuzero.AdamW([p, other], lr=1e-2, **options)
    for step in range(2):
        set_random_gradients([p, other], step)
        optimizer.step()
    write(p)
    written = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0  # a step that moves nothing
    set_random_gradients([p, other], 2)
    optimizer.step()
    assert torch.equal(p, written)
    with torch.no_grad():
        p.neg_()
    written = p.detach().clone()
    saved = optimizer.state_dict()["state"][0]
    if "master" in saved:
        assert torch.equal(saved["master"].to(dtype), written)
    optimizer.step()
    assert torch.equal(p, written)
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    assert not torch.equal(p, written) and (p - written).abs().max() < 0.1


@pytest.mark.parametrize("kept", ["bf16", "fp16", "bf16, split"])
def test_a_written_parameter_trains_on_as_under_zero(kept: str) -> None:
    dtype, options = KEPT[kept]
    precision = {"bf16": "bf16", "fp16": "fp16", "bf16, split": "bf16-split"}[kept]

    def train(cut: bool) -> Tensor:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(7, 5, bias=False).to(dtype)
        if cut:
            npuzero.zero(model, 0, precision=precision, world=SingleWorld())
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2, **({} if cut else options))
        for step in range(6):
            x = torch.randn(3, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                with torch.no_grad():
                    model.weight.clamp_(-0.25, 0.25)
        return model.weight.detach().clone()

    assert torch.equal(train(cut=False), train(cut=True))


def test_masters_keep_their_bits_where_values_stay() -> None:
    """A write of equal values, and a checkpoint whose optimizer is loaded before its model."""
    p = nn.Parameter(torch.randn(33).bfloat16())
    optimizer = npuzero.AdamW([p], lr=1e-2)
    set_random_gradients([p], 0)
    optimizer.step()
    saved, value = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    with torch.no_grad():
        p.mul_(1.0)
        p[3] = 2.0
    master = optimizer.state_dict()["state"][0]["master"]
    same = torch.arange(33) != 3
    assert torch.equal(master[same], saved["state"][0]["master"][same]) and master[3] == 2.0
    later = nn.Parameter(torch.randn(33).bfloat16())
    loaded = npuzero.AdamW([later], lr=1e-2)
    loaded.load_state_dict(saved)
    with torch.no_grad():
        later.copy_(value)
    assert torch.equal(loaded.state_dict()["state"][0]["master"], saved["state"][0]["master"])
