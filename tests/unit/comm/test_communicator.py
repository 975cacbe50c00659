"""The doors of the verbs: what is refused before anything is sent, one rank alone, counting, meshes, worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import npuzero
from npuzero import comm, device
from npuzero.comm import Communicator, World
from npuzero.comm.backends.hierarchical import HierarchicalCommunicator, find_transposed_size
from npuzero.comm.backends.process_group import add_in_order
from npuzero.errors import CollectiveError, ConfigError, ContractError
from npuzero.plan import Sent

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


def run_on_ranks(fn: Callable[[Communicator], None], size: int = 2) -> None:
    comm.run_threads(size, lambda world: fn(world.communicator(range(size), "all")))


def released_tensor(numel: int) -> torch.Tensor:
    tensor = torch.ones(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


ten = torch.zeros(10)
REFUSED: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "no tensor": (lambda c: c.all_reduce([1.0]), "a tensor; got list"),  # type: ignore[arg-type]
    "two dimensions": (lambda c: c.all_reduce(torch.ones(2, 2)), "1-D contiguous"),
    "no dimension": (lambda c: c.all_reduce(torch.tensor(1.0)), "1-D contiguous"),
    "strided": (lambda c: c.all_reduce(torch.ones(8)[::2]), "1-D contiguous"),
    "sparse": (lambda c: c.all_reduce(torch.ones(8).to_sparse()), "1-D contiguous"),
    "another device": (lambda c: c.all_reduce(torch.ones(8, device="meta")), "a tensor on cpu; got one on meta"),
    "released": (lambda c: c.all_reduce(released_tensor(8)), "32 bytes; got 0 bytes: it was released"),
    "bool sum": (lambda c: c.all_reduce(torch.ones(8, dtype=torch.bool)), "one of float32, bfloat16"),
    "int wire": (lambda c: c.reduce_scatter(torch.ones(2).int(), torch.ones(4).int()), "one of float32"),
    "narrow result": (lambda c: c.reduce_scatter(torch.ones(2).half(), torch.ones(4)), "one of float32; got float16"),
    "other half": (lambda c: c.reduce_scatter(ten.half(), torch.ones(20, dtype=bf16)), "one of bfloat16, float32"),
    "shard too small": (lambda c: c.all_gather(ten, torch.ones(4)), "2 ranks * 4 elements of shard; got 10"),
    "whole too small": (lambda c: c.reduce_scatter(ten, torch.ones(10)), "2 ranks * 10 elements"),
    "gather dtypes": (lambda c: c.all_gather(ten, torch.ones(5).half()), "of one dtype; got whole float32, shard"),
    "gather into itself": (lambda c: c.all_gather(ten, ten[1:6]), "apart from each other"),
    "scatter onto itself": (lambda c: c.reduce_scatter(ten[1:6], ten), "apart from each other"),
    "accumulate onto itself": (
        lambda c: c.reduce_scatter(ten[5 * c.rank :][:5], ten, accumulate=True),
        "apart from each other",
    ),
    "exchange in place": (lambda c: c.all_to_all(ten, ten), "apart from each other"),
    "exchange odd": (lambda c: c.all_to_all(torch.ones(5), torch.ones(5)), "a multiple of 2 ranks; got 5 and 5"),
    "exchange unequal": (lambda c: c.all_to_all(torch.ones(4), torch.ones(6)), "of the same size"),
    "exchange dtypes": (lambda c: c.all_to_all(torch.ones(4), torch.ones(4).half()), "of one dtype"),
    "gathered two dimensions": (lambda c: c.gathered(torch.ones(2, 2)), "1-D contiguous"),
    "gathered released": (lambda c: c.gathered(released_tensor(8)), "32 bytes; got 0 bytes: it was released"),
    "scattered elsewhere": (lambda c: c.scattered(torch.ones(8, device="meta")), "a tensor on cpu; got one on meta"),
    "scattered integers": (lambda c: c.scattered(torch.ones(4).int()), "whole: expected one of float32"),
    "scattered odd": (lambda c: c.scattered(torch.ones(5)), "2 ranks * 2 elements of shard; got 5"),
    "root too high": (lambda c: c.broadcast(ten, root=2), "0 to 1; got 2"),
    "root below": (lambda c: c.broadcast(ten, root=-1), "0 to 1; got -1"),
    "send two dimensions": (lambda c: c.send(torch.ones(2, 2), 1 - c.rank), "1-D contiguous"),
    "receive into released": (
        lambda c: c.recv(released_tensor(8), 1 - c.rank),
        "32 bytes; got 0 bytes: it was released",
    ),
    "send to itself": (lambda c: c.send(ten, c.rank), "send: to: expected the index in the group of another rank: 1"),
    "send outside": (lambda c: c.send(ten, 2), "another rank: 1; got 2"),
    "send to no index": (lambda c: c.send(ten, "1"), "another rank: 1; got '1'"),  # type: ignore[arg-type]
    "receive from below": (lambda c: c.recv(ten, -1), "recv: from_: expected the index in the group of another rank"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_sent(what: str) -> None:
    call, said = REFUSED[what]

    def body(group: Communicator) -> None:
        if group.rank == 0:  # the other rank is not in the call: nothing may have been sent
            with pytest.raises(ContractError) as met:
                call(group)
            assert said in str(met.value), met.value
        group.barrier()

    run_on_ranks(body)


def test_refused_by_a_rank_alone_too() -> None:
    group = comm.SingleWorld().communicator((0,), "alone")
    with pytest.raises(ContractError):
        group.all_reduce(torch.ones(2, 2))
    for call in (group.send, group.recv):
        with pytest.raises(ContractError, match="a group of several ranks; got a rank alone: there is nobody else"):
            call(torch.ones(2), 0)


@pytest.mark.parametrize(("wire", "result"), [(f32, f32), (bf16, bf16), (bf16, f32), (f16, f32)])
def test_single_rank_copies(wire: torch.dtype, result: torch.dtype) -> None:
    group = comm.SingleWorld().communicator((0,), "alone")
    source = torch.randn(9).to(wire)
    whole, shard = torch.zeros(9, dtype=wire), torch.zeros(9, dtype=result)
    group.all_gather(whole, source).wait()
    assert torch.equal(whole, source)
    group.all_gather(whole, whole).wait()
    group.reduce_scatter(shard, source).wait()
    assert torch.equal(shard, source.to(result))
    group.reduce_scatter(shard, source, accumulate=True).wait()
    assert torch.equal(shard, (source.float() + source.float()).to(result))
    exchanged = torch.zeros(9, dtype=wire)
    handle = group.all_to_all(exchanged, source)
    assert handle.done() and torch.equal(exchanged, source)
    group.all_reduce(whole).wait()
    group.broadcast(whole, root=0).wait()
    group.barrier()
    assert torch.equal(whole, source)
    group.abort("enough")
    with pytest.raises(CollectiveError, match="enough"):
        group.barrier()


def test_counted_adds_what_a_ring_sends() -> None:
    def body(world: World) -> Sent:
        sent = Sent()
        group = comm.CountingCommunicator(world.communicator(range(4), "all"), sent, {"local": 4})
        assert (group.rank, group.size, group.ranks) == (world.rank, 4, (0, 1, 2, 3))
        whole, shard = torch.ones(40), torch.ones(10)
        for _ in range(2):
            group.all_gather(whole, shard, tag="u").wait()
        group.reduce_scatter(shard, whole.to(bf16)).wait()
        group.all_reduce(whole).wait()
        group.all_to_all(torch.ones(40), whole).wait()
        group.broadcast(shard, root=1).wait()
        if world.rank < 2:
            (group.recv if world.rank else group.send)(whole, 1 - world.rank, "ahead").wait()
            (group.send if world.rank else group.recv)(shard, 1 - world.rank, "back").wait()
        group.barrier()
        with pytest.raises(ContractError):
            group.all_gather(whole, torch.ones(3))
        with pytest.raises(ContractError):
            group.send(whole, world.rank)
        return sent

    by_verb = {"all_gather": 240, "reduce_scatter": 60, "all_reduce": 240, "all_to_all": 120, "broadcast": 30}
    expected = {("local", verb): nbytes for verb, nbytes in by_verb.items()}
    send = "local", "send"
    assert comm.run_threads(4, body) == [expected | {send: 160}, expected | {send: 40}, expected, expected]


#: Of three parts that a ring of four ranks sends as (local, node), how many go along each axis.
PARTS = {"local": 2, "node": 1}


def test_counted_counts_as_a_verb_is_called() -> None:
    """Rank 0 has counted before any other rank has come, though its collectives run on a lane, one after another."""

    def body(world: World) -> Sent:
        mesh, sent = comm.Mesh(world, 2), Sent()
        outer, inner, flat = (mesh.communicator(axes, "all") for axes in (("local",), ("node",), ("node", "local")))
        ranks = mesh.ranks(("local", "node"))
        sizes = mesh.shape.sizes(("local", "node"))
        group = comm.CountingCommunicator(HierarchicalCommunicator(outer, inner, flat, ranks, "all"), sent, sizes)
        if world.rank:
            world.exchange(None)
        whole = torch.ones(40)
        handles = [
            group.all_gather(whole, torch.ones(10)),
            group.reduce_scatter(torch.ones(10), whole),
            group.all_reduce(whole),
            group.all_to_all(torch.ones(40), whole),
            group.broadcast(whole, root=1),
        ]
        if world.rank in (0, 3):
            peer = group.ranks.index(3 - world.rank)
            handles += [group.recv(torch.ones(40), peer), group.send(whole, peer)]
        counted = sent.copy()
        if not world.rank:
            assert not any(handle.done() for handle in handles)
            world.exchange(None)
        for handle in handles:
            handle.wait()
        assert sent == counted
        return counted

    whole = {"all_gather": 120, "reduce_scatter": 120, "all_reduce": 240, "all_to_all": 120, "broadcast": 120}
    expected = {(axis, verb): nbytes * part // 3 for verb, nbytes in whole.items() for axis, part in PARTS.items()}
    sender = expected | {("local", "send"): 160}
    assert comm.run_threads(4, body) == [sender, expected, expected, sender]


@pytest.mark.parametrize(("size", "local"), [(1, 1), (4, 2), (6, 3), (8, 4), (8, 8), (8, 1)])
def test_mesh_is_rank_arithmetic(size: int, local: int) -> None:
    def body(world: World) -> None:
        mesh = comm.Mesh(world, local)
        node, place = divmod(world.rank, local)
        nodes = size // local
        assert mesh.ranks(()) == (world.rank,) and mesh.size(()) == 1
        assert mesh.ranks(("local",)) == tuple(node * local + i for i in range(local))
        assert mesh.ranks(("node",)) == tuple(i * local + place for i in range(nodes))
        assert mesh.ranks(("node", "local")) == tuple(range(size)) and mesh.index(("node", "local")) == world.rank
        assert mesh.ranks(("local", "node")) == tuple(n * local + i for i in range(local) for n in range(nodes))
        assert mesh.index(("local", "node")) == place * nodes + node
        for axes in ((), ("local",), ("node",), ("node", "local"), ("local", "node")):
            assert mesh.size(axes) == len(mesh.ranks(axes)) and mesh.ranks(axes)[mesh.index(axes)] == world.rank
            assert mesh.communicator(axes, "gather") is mesh.communicator(axes, "gather")
            assert mesh.communicator(axes, "gather") is not mesh.communicator(axes, "reduce")
        assert comm.Mesh(world).shape.local == size

    comm.run_threads(size, body)


def test_mesh_refuses() -> None:
    def body(world: World) -> None:
        for local in (0, -1, 3, 5):
            with pytest.raises(ConfigError, match="divisor of the 4 ranks"):
                comm.Mesh(world, local)
        for axes in (("gpu",), ("node", "node")):
            with pytest.raises(ConfigError, match="different axes"):
                comm.Mesh(world, 2).ranks(axes)

    comm.run_threads(4, body)


def test_world_refuses_wrong_groups() -> None:
    def body(world: World) -> None:
        for ranks in ((0, 0), (0, 1, 2, 3, 4), ((world.rank + 1) % 4, (world.rank + 2) % 4), (-1, world.rank)):
            with pytest.raises(ContractError, match="different ranks below 4"):
                world.communicator(ranks, "all")

    comm.run_threads(4, body)


def test_world_of_the_thread() -> None:
    outside = comm.current_world()
    assert outside.size == 1 and outside is comm.current_world()
    assert comm.run_threads(3, lambda world: comm.current_world() is world and world.rank) == [0, 1, 2]
    assert comm.current_world() is outside
    assert outside.exchange({"a": [1, None]}) == [{"a": [1, None]}]


def test_transposed_orders_are_recognised() -> None:
    assert find_transposed_size((0, 2, 1, 3)) == 2
    assert find_transposed_size((0, 4, 1, 5, 2, 6, 3, 7)) == 2
    assert find_transposed_size((0, 2, 4, 6, 1, 3, 5, 7)) == 4
    assert find_transposed_size((1, 9, 5, 13)) == 2
    for other in ((0, 1, 2, 3), (3, 2, 1, 0), (0, 1), (0, 2, 3, 1), (0,)):
        assert find_transposed_size(other) is None


@pytest.mark.parametrize("dtype", (f32, bf16, f16))
def test_add_in_order_rounds_once(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 100).to(dtype)
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    out = torch.ones(100, dtype=dtype)
    add_in_order(out, rows)
    assert torch.equal(out, total.to(dtype))
    add_in_order(out, rows, accumulate=True)
    assert torch.equal(out, (total + total.to(dtype).float()).to(dtype))


def set_launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("npuzero.comm.joining._process_world", None)


def test_start_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch)
    world = comm.process_world("cpu", timeout_s=3)
    assert repr(world) == "SingleWorld(rank=0, size=1, device=cpu)" and world.timeout_s == 3
    assert comm.current_world() is world


@pytest.fixture
def eight_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host of eight GPUs, as far as joining looks at them."""
    monkeypatch.setattr(device.KINDS["npu"], "available", classmethod(lambda cls: device.Availability(False)))
    monkeypatch.setattr(device.KINDS["cuda"], "available", classmethod(lambda cls: device.Availability(True)))
    monkeypatch.setattr(device.KINDS["cuda"], "count", classmethod(lambda cls: 8))
    yield
    device.get.cache_clear()


@pytest.mark.parametrize("wanted", [None, "cuda"])
def test_one_rank_of_many_devices_is_told_once_that_it_is_alone(
    wanted: str | None, eight_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launch(monkeypatch)
    with pytest.warns(RuntimeWarning, match="one rank of 8 cuda devices.* torchrun --nproc-per-node 8") as found:
        world = npuzero.init(wanted)
    assert world.size == 1 and [warning.filename for warning in found] == [__file__]
    assert npuzero.init(wanted) is world and comm.current_world() is world  # no second warning: it would be an error


def test_who_calls_no_init_is_told_as_well(eight_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch)
    with pytest.warns(RuntimeWarning, match="alone, on cuda:0") as found, pytest.raises(ConfigError, match="on cpu"):
        npuzero.zero(torch.nn.Linear(2, 2))
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize(("variable", "tasks"), [("SLURM_STEP_NUM_TASKS", "4"), ("OMPI_COMM_WORLD_SIZE", "2")])
def test_tasks_of_srun_without_ranks_are_told_that_each_is_alone(
    variable: str, tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launch(monkeypatch)
    monkeypatch.setenv(variable, tasks)
    with pytest.warns(RuntimeWarning, match=f"one of {tasks} tasks .* each of which trains alone") as found:
        assert npuzero.init("cpu").size == 1
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize("variables", [{"SLURM_STEP_NUM_TASKS": "1"}, {"OMPI_COMM_WORLD_SIZE": "some"}])
def test_one_task_alone_is_told_nothing(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert npuzero.init("cpu").size == 1


@pytest.mark.parametrize(
    ("wanted", "variables"),
    [("cuda:3", {}), ("cpu", {}), (None, {"RANK": "0", "WORLD_SIZE": "1"}), ("cuda", {"RANK": "0", "WORLD_SIZE": "1"})],
)
def test_one_rank_on_purpose_is_told_nothing(
    wanted: str | None, variables: dict[str, str], eight_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_launch(monkeypatch, **variables)
    assert npuzero.init(wanted).size == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: expected the variable"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected less than WORLD_SIZE = 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the launcher's variables; got no MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_start_with_half_an_environment(variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch, **variables)
    with pytest.raises(ConfigError, match=said):
        comm.process_world("cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "npu"}, "npu"),
        ({"backend": "mpi"}, "one of shm, gloo, nccl, hccl"),
        ({"device": "cpu", "backend": "nccl"}, "one of shm, gloo for cpu"),
    ],
)
def test_start_refuses(arguments: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        comm.process_world(**arguments)  # type: ignore[arg-type]
