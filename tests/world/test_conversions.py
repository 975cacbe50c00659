"""``model.to()`` and similar calls after ``zero()``, as trainers make them: a no-op or an error."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import npuzero
from npuzero import StateError, comm
from npuzero.comm import World
from world.toy import ToyGPT, build_seeded_model
from world.train import Session, State, check_equals_plain

#: Plans that use every rule of the table; `make test-all` runs the remaining plans.
PLANS = ("zero1", "zero3", "hpz", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)

#: Each call names the present device or dtype of the model.
NOTHING: tuple[Callable[[nn.Module], object], ...] = (
    lambda model: model.to("cpu"),
    lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    lambda model: model.to(torch.zeros(1)),
    lambda model: model.to("cpu:0"),
    lambda model: model.to(memory_format=torch.contiguous_format),
    lambda model: model.float(),
    lambda model: model.cpu(),
    lambda model: model._apply(lambda tensor: tensor),
    lambda model: model.requires_grad_(True).train(),
    lambda model: [module.to("cpu") for module in model.modules()],
    lambda model: model.get_submodule("blocks.1").float(),
)


class TrainableGPT(ToyGPT):
    """A model with all parameters trainable, so that ``requires_grad_(True)`` changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)


def put_where_it_is(session: Session) -> State:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        for change in NOTHING:
            change(session.model)
        session.loss(step).backward()
        for change in NOTHING:
            change(session.model)
        optimizer.step()
        optimizer.zero_grad()
    return {}


@every_plan
def test_a_model_that_is_put_where_it_is_trains_on(plan: str) -> None:
    check_equals_plain(put_where_it_is, 4, TrainableGPT, plan=plan, local_size=2)


@every_plan
def test_a_conversion_that_changes_nothing_is_no_write(plan: str) -> None:
    """Split masters would lose their lower halves by one."""

    def rank(world: World) -> bool:
        weights = []
        for converted in (False, True):
            model = npuzero.zero(
                build_seeded_model().bfloat16(), plan=plan, local_size=2, precision="bf16-split", world=world
            )
            optimizer = npuzero.AdamW(model.parameters(), lr=1e-4)
            for _ in range(3):
                model(torch.arange(12)[None]).float().square().mean().backward()
                if converted:
                    model.bfloat16().to("cpu", torch.bfloat16)
                optimizer.step()
                optimizer.zero_grad()
            weights.append(npuzero.full_state_dict(model, rank0_only=False))
        return all(torch.equal(weights[0][name], value) for name, value in weights[1].items())

    assert all(comm.run_threads(2, rank))


class PictureModel(nn.Module):
    """A model of convolutions, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


#: Calls that would move or convert parameters, and the words of the error.
CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "half": (lambda model: model.half(), "float16"),
    "double": (lambda model: model.double(), "float64"),
    "to bfloat16": (lambda model: model.to(torch.bfloat16), "bfloat16"),
    "to meta": (lambda model: model.to("meta"), "meta"),
    "to_empty": (lambda model: model.to_empty(device="cpu"), "writes"),
    "channels_last": (lambda model: model.to(memory_format=torch.channels_last), "memory format"),
    "share_memory": (lambda model: model.share_memory(), "writes"),
    "zeros by _apply": (lambda model: model._apply(lambda tensor: tensor.zero_()), "writes"),
    "one module": (lambda model: model.layers[0].half(), "float16"),
}


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_conversion_that_changes_something_is_one_error(change: str, plan: str) -> None:
    function, got = CHANGES[change]

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=PictureModel), plan=plan, world=world)
        optimizer = npuzero.AdamW(model.parameters())
        model(torch.ones(2, 3, 8, 8)).square().sum().backward()
        with pytest.raises(StateError, match=r"npuzero\.zero\(model, precision=") as caught:
            function(model)
        assert got in caught.value.got and "weight" in caught.value.expected
        assert re.fullmatch(r"(PictureModel|Conv2d)\.\w+\(\) after npuzero\.zero\(\)", caught.value.subject)
        assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in model.buffers())
        optimizer.step()  # nothing was changed
        model(torch.ones(2, 3, 8, 8)).square().sum().backward()

    comm.run_threads(2, rank)


def test_channels_last_comes_with_the_input() -> None:
    model = npuzero.zero(build_seeded_model(make=PictureModel), plan="zero3")
    found = model(torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_buffers_may_be_converted() -> None:
    """``model.to(torch.bfloat16)`` converts a float32 buffer next to bfloat16 parameters, as in torch."""
    model = npuzero.zero(build_seeded_model(make=PictureModel).bfloat16(), plan="zero3")
    model.layers[1].register_buffer("wide", torch.ones(4))
    model.to(torch.bfloat16)
    assert model.layers[1].wide.dtype == torch.bfloat16


def test_a_copy_of_a_module_is_its_owners_to_convert() -> None:
    model = npuzero.zero(build_seeded_model(), plan="zero3")
    with npuzero.gathered(model):
        head = copy.deepcopy(model.norm)
    assert head.half().weight.dtype == torch.float16
    assert model.norm.weight.dtype == torch.float32


@every_plan
def test_a_copy_of_a_block_computes_with_its_own_weights(plan: str) -> None:
    """Copies such as a target network or an average."""

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan=plan, local_size=2, world=world)
        with npuzero.gathered(model), torch.no_grad():
            block = copy.deepcopy(model.blocks[0])
            found = block(torch.ones(1, 3, 16))
            assert torch.equal(found, model.blocks[0](torch.ones(1, 3, 16)))
            for parameter in block.parameters():
                parameter.zero_()
            assert torch.equal(block(torch.ones(1, 3, 16)), torch.ones(1, 3, 16))
        block.half().compile()
        assert copy.deepcopy(block)(torch.ones(1, 3, 16).half()).isfinite().all()

    comm.run_threads(2, rank)


# -- other engines around it -------------------------------------------------------------------------------------------


class WrappingModule(nn.Module):
    """A sharded model as a submodule, as in a LightningModule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DDP": (DistributedDataParallel, "DistributedDataParallel around"),
    "DDP around a module that has it": (
        lambda model: DistributedDataParallel(WrappingModule(model)),
        "DistributedData",
    ),
    "fully_shard": (fully_shard, "FSDP|fully_shard around"),
}


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_another_engine_around_it_is_an_error_that_says_so(wrapper: str, plan: str, process_group: None) -> None:
    wrap, says = WRAPPERS[wrapper]

    def rank(world: World) -> None:
        model = npuzero.zero(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan=plan, world=world)
        optimizer = npuzero.AdamW(model.parameters())
        with pytest.raises(StateError, match=says) as caught:
            wrap(model)(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert "model.to()" not in str(caught.value)

    comm.run_threads(2 if plan == "zero3" else 1, rank)  # one rank where torch issues its own collectives


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("engine", [DistributedDataParallel, DataParallel])
def test_torchs_engines_are_refused_without_a_process_group_and_on_the_cpu(
    engine: Callable[..., nn.Module], plan: str
) -> None:
    """DDP would fail there without its process group, and DataParallel do nothing."""
    model = npuzero.zero(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan=plan)
    for around in (model, WrappingModule(model)):
        with pytest.raises(StateError, match=f"^{engine.__name__} around a model made by npuzero.zero"):
            engine(module=around)


def test_a_model_of_ones_own_may_be_wrapped_beside_it() -> None:
    npuzero.zero(nn.Linear(4, 4), plan="zero3")
    plain = nn.Linear(4, 4)
    assert torch.equal(DataParallel(plain)(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    with pytest.raises(ValueError, match="process group"):
        DistributedDataParallel(plain)


def test_ddp_may_have_the_rest_of_a_model(process_group: None) -> None:
    inner = npuzero.zero(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan="zero3")
    outer = nn.Sequential(WrappingModule(inner), nn.Linear(4, 1))
    names = [name for name, parameter in outer.named_parameters() if name.startswith("0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, names)
    DistributedDataParallel(outer)(torch.ones(1, 4)).sum().backward()
    npuzero.AdamW(inner.parameters()).step()
