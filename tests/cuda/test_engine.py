"""The engine on a GPU: trained numbers, memory against torch's count, an allocator at rest, NCCL in a group of one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import npuzero
from npuzero import comm
from npuzero.comm.backends import process_group
from npuzero.shard.find_engine import engine_of

pytestmark = pytest.mark.gpu

DIM, BLOCKS = 512, 8
FIGURES = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "segment.all.current",
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    gc.collect()  # models of earlier tests are held by cycles
    torch.cuda.empty_cache()
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()


class CudaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wide, self.narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


def build_cuda_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(CudaBlock() for _ in range(BLOCKS)), nn.Linear(DIM, 8)).to(device)


def make_cuda_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object], dtype: torch.dtype
) -> Callable[[int], torch.Tensor]:
    def step(number: int) -> torch.Tensor:
        x = torch.randn(32, DIM, generator=torch.Generator().manual_seed(number))
        loss = model(x.to("cuda", dtype)).float().square().mean()
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_sharded_step(
    device: torch.device, plan: str, precision: str | None = None
) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """A model, and its training step by the number of the batch."""
    model = npuzero.zero(build_cuda_model(device), plan=plan, precision=precision, world=comm.SingleWorld(device))
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    dtype = next(model.parameters()).dtype
    return model, make_cuda_step(model, optimizer, lambda: npuzero.clip_grad_norm_(model, 1.0), dtype)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.11's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_it_trains_as_plain_torch(device: torch.device, plan: str, compiled: bool) -> None:
    plain = build_cuda_model(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    expected = make_cuda_step(
        plain, optimizer, lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0), torch.float32
    )
    model, found = build_sharded_step(device, plan)
    if compiled:
        for block in list(model.children())[:BLOCKS]:
            block.compile(fullgraph=True)
    for number in range(5):
        torch.testing.assert_close(found(number), expected(number), rtol=1e-4, atol=1e-5)
    for name, value in plain.state_dict().items():
        other = npuzero.full_state_dict(model)[name].to(device)
        assert (other - value).abs().max() <= 2e-3 * value.abs().max(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-split", "bf16-8bit"])
def test_what_is_counted_is_what_torch_has_allocated(device: torch.device, precision: str) -> None:
    before = torch.cuda.memory_allocated(device)
    model, step = build_sharded_step(device, "zero3", precision)
    for number in range(3):
        step(number)
    torch.cuda.synchronize()
    counted = sum(engine_of(model).spaces[npuzero.Memory.DEVICE].held.values())
    allocated = torch.cuda.memory_allocated(device) - before
    assert abs(allocated - counted) <= 0.02 * counted, f"{counted:,} bytes counted, {allocated:,} allocated"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_high_water_is_predicted(device: torch.device, precision: str) -> None:
    """On so little data that activations are next to nothing: what the plan says, and what a rank reports."""
    before = torch.cuda.memory_allocated(device)
    model, step = build_sharded_step(device, "zero3", precision)
    step(0)
    torch.cuda.reset_peak_memory_stats(device)
    step(1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - before
    reported = sum(npuzero.report(model).memory.values())
    predicted = sum(npuzero.predict(build_cuda_model(torch.device("cpu")), 3, 1, precision=precision).memory.values())
    assert reported == predicted
    largest = 4 * DIM * DIM * 4 * 2  # a unit's gradients, before they are packed
    assert predicted <= peak <= 1.03 * predicted + largest, f"{predicted:,} bytes predicted, {peak:,} allocated"


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_the_allocator_is_at_rest_in_a_steady_step(device: torch.device, plan: str) -> None:
    """No bytes are left behind by a step, no more are reserved, and the peak is that of the step before."""
    _, step = build_sharded_step(device, plan, "bf16")
    seen = []
    for number in range(8):
        torch.cuda.reset_peak_memory_stats(device)
        step(number)
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats(device)
        seen.append([stats[name] for name in FIGURES])
    assert seen[-4:] == [seen[-1]] * 4, seen


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_waits_for_nothing(device: torch.device) -> None:
    data = torch.randn(32, DIM, device=device, dtype=torch.bfloat16)
    model, _ = build_sharded_step(device, "zero3", "bf16")
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)

    def quiet() -> None:
        model(data).float().square().mean().backward()
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    quiet()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            quiet()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def nccl(device: torch.device) -> Iterator[torch.device]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


def test_nccl_in_a_group_of_one(nccl: torch.device) -> None:
    group = process_group.make_group([0], "nccl", "test", timeout_s=60)
    communicator = process_group.AcceleratorCommunicator(group, [0], 0, "test", nccl, "nccl")
    whole, shard = torch.zeros(64, device=nccl), torch.arange(64.0, device=nccl)
    communicator.all_gather(whole, shard).wait()
    assert torch.equal(whole, shard)
    communicator.reduce_scatter(shard, whole, accumulate=True).wait()
    assert torch.equal(shard, 2 * whole)
    communicator.all_reduce(shard).wait()
    communicator.broadcast(shard, root=0).wait()
    assert torch.equal(shard, 2 * whole)


def test_a_world_of_one_on_torchs_process_group(nccl: torch.device) -> None:
    """The device and the backend are found; nothing is asked of anybody."""
    world = npuzero.init()
    assert (world.device, world.size) == (nccl, 1)
    model = npuzero.zero(build_cuda_model(nccl), stage=3, world=world)
    optimizer = npuzero.AdamW(model.parameters())
    model(torch.ones(2, DIM, device=nccl)).sum().backward()
    optimizer.step()
    assert not any(npuzero.report(model).bytes_sent.values())


@pytest.mark.parametrize("precision", [None, "bf16", "bf16-8bit"])
def test_kernels_update_what_rests_on_the_host(device: torch.device, precision: str | None) -> None:
    """In place, at the addresses that pinned memory has for both: to the bits of an update by the host."""

    def trained(update_on: str) -> list[torch.Tensor]:
        settings = npuzero.Settings(chunk_bytes=2**20, update_on=update_on)
        world = comm.SingleWorld(device)
        model = npuzero.zero(
            build_cuda_model(device), plan="offload3", precision=precision, world=world, settings=settings
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
        step = make_cuda_step(
            model, optimizer, lambda: npuzero.clip_grad_norm_(model, 1.0), next(model.parameters()).dtype
        )
        for number in range(3):
            step(number)
        return list(npuzero.full_state_dict(model).values())

    for found, expected in zip(trained("device"), trained("host"), strict=True):
        assert torch.equal(found, expected)


def test_a_training_state_leaves_the_device(device: torch.device) -> None:
    before = torch.cuda.memory_allocated()
    model, step = build_sharded_step(device, "zero3")
    step(0)
    large = torch.cuda.memory_allocated() - before
    with npuzero.offloaded(model):
        assert torch.cuda.memory_allocated() - before < large // 10
    step(1)
