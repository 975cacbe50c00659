"""Cases that every communicator must pass, for any kind of world. The oracle is plain torch.

Each case is a function of a world; it runs on threads, on processes over shared memory, and over gloo.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from npuzero import comm
from npuzero.comm import Communicator, World
from npuzero.comm.backends import shared_memory

WIRES = (torch.float32, torch.bfloat16, torch.float16)
SUMMED = (*WIRES, torch.float64, torch.int32, torch.int64, torch.uint8)
MOVED = (*SUMMED, torch.int8, torch.bool, torch.float8_e4m3fn)


def rank_values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the input of `rank`; any rank can draw it. Floats span many exponents, to show the order of a sum."""
    generator = torch.Generator().manual_seed(1000 * rank + numel % 997)
    if dtype == torch.bool:
        return torch.randint(2, (numel,), generator=generator).to(dtype)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, (numel,), generator=generator, dtype=torch.int64).to(dtype)
    exponents = torch.randint(-6, 7, (numel,), generator=generator).float()
    return (torch.randn(numel, generator=generator) * torch.exp2(exponents)).to(dtype)


def sum_in_order(tensors: list[torch.Tensor], start: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum in the given order, in f32 if the dtype is narrower; then add `start`."""
    half = tensors[0].dtype in (torch.bfloat16, torch.float16)
    total = tensors[0].float() if half else tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + (tensor.float() if half else tensor)
    return total if start is None else total + start.float()


def assert_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.dtype == expected.dtype, what
    wrong = (got.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first at {wrong[0].item()} of {got.numel()} elements"


def border_sizes(group: Communicator, item: int) -> list[int]:
    """Return element counts around the borders of a slot and of a peer's part of it."""
    slot = shared_memory.SLOT_BYTES // item
    part = shared_memory.SLOT_BYTES // max(1, group.size - 1) // 64 * 64 // item
    borders = {part - 1, part, part + 1, slot - 1, slot, slot + 1, 3 * slot + 5}
    return sorted({0, 1, 7, *borders})


def case_communicators(world: World, backend: str = "") -> list[Communicator]:
    """Return orders of all ranks: ascending, reversed, and as transposed axes where the world allows."""
    everyone = tuple(range(world.size))
    orders = [everyone, everyone[::-1]]
    if world.size % 2 == 0 and world.size > 2:
        orders.append(comm.Mesh(world, 2).ranks(("local", "node")))
    return [world.communicator(order, "case") for order in orders]


Put = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check_all_gather(group: Communicator, dtype: torch.dtype, n: int, put: Put = as_it_is) -> None:
    """Check one collective. Here and below `put` places a rank's input."""
    expected = torch.cat([rank_values(rank, n, dtype) for rank in group.ranks])
    whole = torch.zeros(group.size * n, dtype=dtype)
    group.all_gather(whole, put(rank_values(group.ranks[group.rank], n, dtype)), tag="apart").wait()
    assert_bits(whole, expected, f"all_gather {dtype} {n}")
    inside = put(torch.zeros_like(whole))
    own = inside[group.rank * n : (group.rank + 1) * n]
    own.copy_(rank_values(group.ranks[group.rank], n, dtype))
    group.all_gather(inside, own, tag="inside").wait()
    assert_bits(inside, expected, f"all_gather in place {dtype} {n}")


def check_case_reduce_scatter(group: Communicator, wire: torch.dtype, n: int, put: Put = as_it_is) -> None:
    wholes = [rank_values(rank, group.size * n, wire) for rank in sorted(group.ranks)]
    own = slice(group.rank * n, (group.rank + 1) * n)
    parts = [whole[own] for whole in wholes]
    for result, accumulate in itertools.product({wire, torch.float32}, (False, True)):
        whole = put(rank_values(group.ranks[group.rank], group.size * n, wire))
        shard = rank_values(77, n, result)
        expected = sum_in_order(parts, shard if accumulate else None).to(result)
        group.reduce_scatter(shard, whole, accumulate=accumulate).wait()
        what = f"reduce_scatter {wire} to {result}, accumulate={accumulate}, {n}, order {group.ranks}"
        assert_bits(shard, expected, what)
        assert_bits(whole, rank_values(group.ranks[group.rank], group.size * n, wire), "whole after " + what)
    group.reduce_scatter(whole[own], whole).wait()
    assert_bits(whole[own], sum_in_order(parts).to(wire), f"reduce_scatter in place {wire} {n}")


def check_case_all_reduce(group: Communicator, dtype: torch.dtype, n: int, put: Put = as_it_is) -> None:
    buffer = put(rank_values(group.ranks[group.rank], n, dtype))
    group.all_reduce(buffer).wait()
    expected = sum_in_order([rank_values(rank, n, dtype) for rank in sorted(group.ranks)]).to(dtype)
    assert_bits(buffer, expected, f"all_reduce {dtype} {n}")


def check_all_to_all(group: Communicator, dtype: torch.dtype, n: int, put: Put = as_it_is) -> None:
    out = torch.zeros(group.size * n, dtype=dtype)
    group.all_to_all(out, put(rank_values(group.ranks[group.rank], group.size * n, dtype))).wait()
    own = slice(group.rank * n, (group.rank + 1) * n)
    expected = torch.cat([rank_values(rank, group.size * n, dtype)[own] for rank in group.ranks])
    assert_bits(out, expected, f"all_to_all {dtype} {n}")


def check_broadcast(group: Communicator, dtype: torch.dtype, n: int, put: Put = as_it_is) -> None:
    for root in range(group.size):
        buffer = put(rank_values(group.ranks[group.rank], n, dtype))
        group.broadcast(buffer, root=root).wait()
        assert_bits(buffer, rank_values(group.ranks[root], n, dtype), f"broadcast {dtype} {n} from {root}")


def check_send(group: Communicator, dtype: torch.dtype, n: int, put: Put = as_it_is) -> None:
    """Exchange around a ring both ways at once: each rank first sends to its neighbours, then receives."""
    neighbours = sorted({(group.rank + 1) % group.size, (group.rank - 1) % group.size})
    mine = put(rank_values(group.ranks[group.rank], n, dtype))
    got = [torch.zeros(n, dtype=dtype) for _ in neighbours]
    handles = [group.send(mine, to, f"to {to}") for to in neighbours]
    handles += [group.recv(buffer, peer, f"to {group.rank}") for buffer, peer in zip(got, neighbours, strict=True)]
    for handle in handles:
        handle.wait()
    for buffer, peer in zip(got, neighbours, strict=True):
        assert_bits(buffer, rank_values(group.ranks[peer], n, dtype), f"send {dtype} {n} from {peer}")
    assert_bits(mine, rank_values(group.ranks[group.rank], n, dtype), "what was sent")


def check_all_verbs(world: World, few: bool = False) -> None:
    """Check every verb, dtype, size around a border, and order of the group."""
    for group in case_communicators(world):
        for check, dtypes in (
            (check_all_gather, MOVED),
            (check_case_reduce_scatter, WIRES),
            (check_case_all_reduce, SUMMED),
            (check_all_to_all, MOVED),
            (check_broadcast, MOVED),
            (check_send, MOVED[::3]),
        ):
            for dtype in dtypes[:3] if few else dtypes:
                numels = border_sizes(group, dtype.itemsize)
                if check is check_case_all_reduce:
                    numels += [group.size * numel + 1 for numel in numels[-3:]]
                for n in numels[::3] if few else numels:
                    check(group, dtype, n)
        group.barrier()


def reduce_in_place(world: World) -> None:
    """Large buffers that all ranks, or some, can read in place."""
    for group in case_communicators(world):

        def reachable(tensor: torch.Tensor, group: Communicator = group) -> torch.Tensor:
            buffer = group.buffer(tensor.numel() + 3, tensor.dtype)
            assert not buffer.any()
            return buffer[3:].copy_(tensor)  # a view, at an odd address

        for check, dtypes in (
            (check_all_gather, (torch.float32, torch.int8)),
            (check_case_reduce_scatter, WIRES),
            (check_case_all_reduce, SUMMED),
            (check_all_to_all, (torch.bfloat16, torch.int64)),
            (check_broadcast, (torch.bfloat16,)),
            (check_send, (torch.float32, torch.int8)),
        ):
            for dtype in dtypes:
                n = (1 << 17) // dtype.itemsize + 37
                check(group, dtype, n, reachable)
                check(group, dtype, n, reachable if world.rank % 2 else as_it_is)
        for _ in range(8):
            for n in (16383, 16384, 16385):  # around the size from which buffers are read in place
                check_case_all_reduce(group, torch.float32, n, reachable)
        group.barrier()


def many_case_handles(world: World) -> None:
    """Handles pile up, are waited for in another order, and some are dropped."""
    group = world.communicator(range(world.size), "case")
    n, count = 3000, 40
    shards = [torch.zeros(n) for _ in range(count)]
    wholes = [rank_values(world.rank + k, world.size * n, torch.float32) for k in range(count)]
    handles = [group.reduce_scatter(shards[k], wholes[k], tag=f"u{k}") for k in range(count)]
    group.all_gather(torch.zeros(world.size * n), torch.ones(n))  # its handle and its tensors are dropped
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
        assert handle.done()
    own = slice(world.rank * n, (world.rank + 1) * n)
    for k, shard in enumerate(shards):
        parts = [rank_values(rank + k, world.size * n, torch.float32)[own] for rank in range(world.size)]
        assert_bits(shard, sum_in_order(parts), f"operation {k} of many")
    group.barrier()


def two_case_channels(world: World) -> None:
    """Ranks use two communicators in different order; neither waits for the other."""
    everyone = range(world.size)
    buffers = {name: torch.full((20000,), float(world.rank + 1)) for name in ("gather", "reduce")}
    for name in buffers:
        world.communicator(everyone, name)  # members make them in the same order
    names = sorted(buffers, reverse=world.rank % 2 == 1)
    handles = []
    for _ in range(5):
        handles += [world.communicator(everyone, name).all_reduce(buffers[name]) for name in names]
    for handle in handles:
        handle.wait()
    first = world.size * (world.size + 1) / 2
    for buffer in buffers.values():
        assert buffer[0] == buffer[-1] == first * world.size**4


def run_1f1b_sends(world: World) -> None:
    """1F1B over all ranks: stages send activations ahead and gradients back, and wait only for their inputs."""
    rank, last = world.rank, world.size - 1
    group = world.communicator(range(world.size), "stages")
    micro_batches, n = 2 * world.size, 60_000
    sent: list[torch.Tensor] = []
    handles: list[comm.AsyncHandle] = []

    def take(peer: int, tag: str) -> torch.Tensor:
        buffer = torch.zeros(n)
        group.recv(buffer, peer, tag).wait()
        return buffer

    def give(buffer: torch.Tensor, peer: int, tag: str) -> None:
        sent.append(buffer)
        handles.append(group.send(buffer, peer, tag))

    def forward(k: int) -> None:
        value = take(rank - 1, f"ahead {k}") if rank else rank_values(k, n, torch.float32)
        if rank < last:
            give(value + rank, rank + 1, f"ahead {k}")
        else:
            arrived.append(value)

    def backward(k: int) -> None:
        value = take(rank + 1, f"back {k}") if rank < last else -arrived[k]
        if rank:
            give(2 * value, rank - 1, f"back {k}")
        else:
            expected = rank_values(k, n, torch.float32)
            for stage in range(last):
                expected = expected + stage
            assert_bits(value, -expected * 2**last, f"micro-batch {k}")

    arrived: list[torch.Tensor] = []
    warm = min(micro_batches, last - rank)
    for k in range(warm):
        forward(k)
    for k in range(warm, micro_batches):
        forward(k)
        backward(k - warm)
    handles.append(group.all_reduce(torch.ones(100)))  # a collective of the same communicator, wherever the stages are
    for k in range(micro_batches - warm, micro_batches):
        backward(k)
    for handle in handles:
        handle.wait()
    group.barrier()


def sends_of_some(world: World) -> None:
    """Two ranks send to each other while the remaining ranks, and their own collectives, are elsewhere."""
    group = world.communicator(range(world.size), "some")
    n, first, last = 50_000, 0, world.size - 1
    if world.rank in (first, last):
        peer = last - world.rank
        kept = [torch.full((n,), float(k)) for k in range(30)]
        got = [torch.zeros(n) for _ in kept]
        for k, buffer in enumerate(kept):
            group.send(buffer, peer, f"u{k}")  # its handle is dropped
        handles = [group.recv(buffer, peer, f"u{k}") for k, buffer in enumerate(got)]
        for handle in reversed(handles):
            handle.wait()
        assert all(torch.equal(*pair) for pair in zip(got, kept, strict=True))
    group.barrier()


def check_subgroups(world: World) -> None:
    """Each half of the world works independently, and so does a group of one rank."""
    mesh = comm.Mesh(world, 2 if world.size % 2 == 0 else 1)
    for axes in (("local",), ("node",), ()):
        group = mesh.communicator(axes, "case")
        check_case_reduce_scatter(group, torch.bfloat16, 1111)
        check_all_gather(group, torch.float32, 1111)
        check_case_all_reduce(group, torch.float16, 1111)
        check_all_to_all(group, torch.int64, 111)
        check_broadcast(group, torch.float32, 11)
        if group.size > 1:
            check_send(group, torch.int64, 111)
        group.barrier()


def check_exchanges(world: World) -> None:
    for k in range(5):
        assert world.exchange({"rank": world.rank, "k": [k, None]}) == [
            {"rank": rank, "k": [k, None]} for rank in range(world.size)
        ]


def check_means(world: World) -> None:
    """A loss with a gradient, a strided view, counts and a plain number: the same bits on every rank."""
    losses = [rank_values(rank, 12, torch.float32).view(3, 4).T for rank in range(world.size)]
    mine = losses[world.rank].clone().requires_grad_() * 1
    got = world.mean(mine)
    assert not got.requires_grad and got.shape == (4, 3)
    expected = sum_in_order([loss.contiguous() for loss in losses]) / world.size
    assert_bits(got, expected, "mean of float32")
    assert torch.equal(mine, losses[world.rank]), "what was given keeps its values"
    for value in (torch.tensor(world.rank, dtype=torch.bfloat16), torch.tensor(world.rank), world.rank):
        assert_bits(world.mean(value).view(1), torch.tensor([(world.size - 1) / 2]), f"mean of {value}")
    assert world.mean(torch.full((2,), 0.1, dtype=torch.float64)).dtype == torch.float64


def all_cases(world: World, few: bool = False) -> None:
    check_exchanges(world)
    check_means(world)
    check_all_verbs(world, few)
    reduce_in_place(world)
    many_case_handles(world)
    two_case_channels(world)
    check_subgroups(world)
    sends_of_some(world)
    run_1f1b_sends(world)
