"""Bad inputs: settings, environment and init()."""

from __future__ import annotations

import os

import npuzero
from npuzero import CollectiveError, ConfigError, Settings, config
from npuzero.comm import World

from .case import BadInputTable, shard_toy

TABLE = BadInputTable()
bad = TABLE.bad

for _name, _make, _says in [
    ("unknown setting", lambda: Settings.from_dict({"prefech": 1}), ("prefech", "Did you mean 'prefetch'")),
    ("setting is text", lambda: Settings(prefetch="1"), ("prefetch", "integer", "'1'")),
    ("setting is 1 for True", lambda: Settings(overlap=1), ("overlap", "True or False")),
    ("prefetch -1", lambda: Settings(prefetch=-1), ("prefetch", "from 0", "-1")),
    ("prefetch True", lambda: Settings(prefetch=True), ("prefetch", "True")),
    ("bucket 0", lambda: Settings(bucket_bytes=0), ("bucket_bytes", "from 1")),
    ("settings is a list", lambda: Settings.from_dict([1]), ("mapping",)),
    ("settings replaced by unknown", lambda: Settings().replace(overlapp=True), ("overlapp", "'overlap'")),
    ("variable unknown", lambda: config.read_environment({"NPUZERO_BACKENDS": "native"}), ("BACKENDS",
        "NPUZERO_BACKEND'")),
    ("variable's value unknown", lambda: config.read_environment({"NPUZERO_BACKEND": "fast"}), ("native, refer",
        "fast")),
    ("instruction set unknown", lambda: config.read_environment({"NPUZERO_ISA": "sse9"}), ("NPUZERO_ISA", "avx2",
        "sse9")),
    ("variable no number", lambda: config.read_environment({"NPUZERO_TIMEOUT_S": "soon"}), ("TIMEOUT_S", "number",
        "soon")),
    ("init timeout is text", lambda: npuzero.init("cpu", timeout_s="10"), ("timeout_s", "'10'")),
    ("init timeout -1", lambda: npuzero.init("cpu", timeout_s=-1), ("timeout_s", "-1")),
    ("device unknown", lambda: npuzero.init("tpu"), ("npu, cuda, cpu", "tpu")),
    ("device gpu", lambda: npuzero.init("gpu"), ("npu, cuda, cpu", "Did you mean 'cuda'")),
    ("backend misspelt", lambda: npuzero.init("cpu", backend="ncll"), ("shm, gloo", "Did you mean 'nccl'")),
    ("device is a number", lambda: npuzero.init(0), ("npu, cuda, cpu", "0")),
    ("device npu without torch_npu", lambda: npuzero.init("npu"), ("torch_npu", "Install")),
    ("device cuda without it", lambda: npuzero.init("cuda:0"), ("CUDA", "Install")),
    ("backend unknown", lambda: npuzero.init("cpu", backend="mpi"), ("shm, gloo, nccl, hccl", "mpi")),
    ("backend of another device", lambda: npuzero.init("cpu", backend="hccl"), ("shm, gloo", "hccl")),
]:  # fmt: skip
    bad(_name, ConfigError, *_says)(lambda world, make=_make: make())


for _name, _variables, _says in [
    ("RANK without WORLD_SIZE", {"RANK": "0"}, ("WORLD_SIZE", "torchrun")),
    ("WORLD_SIZE without RANK", {"WORLD_SIZE": "2"}, ("RANK", "torchrun")),
    ("RANK beyond WORLD_SIZE", {"RANK": "2", "WORLD_SIZE": "2"}, ("RANK", "less than WORLD_SIZE = 2")),
    ("RANK no number", {"RANK": "first", "WORLD_SIZE": "2"}, ("RANK", "integer", "first")),
    ("WORLD_SIZE 0", {"RANK": "0", "WORLD_SIZE": "0"}, ("WORLD_SIZE", "from 1")),
    ("no MASTER_ADDR", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, ("MASTER_ADDR", "torchrun")),
]:  # fmt: skip

    @bad(_name, ConfigError, *_says)
    def _(world: World, variables: dict[str, str] = _variables) -> None:
        os.environ.update(variables)
        npuzero.init("cpu")


@bad("MASTER_PORT no number", CollectiveError, "localhost:x", "ValueError")
def _(world: World) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="x")
    npuzero.init("cpu")


@bad("unknown NPUZERO_ variable at init", ConfigError, "NPUZERO_BAKEND", "NPUZERO_BACKEND'")
def _(world: World) -> None:
    os.environ["NPUZERO_BAKEND"] = "native"
    npuzero.init("cpu")


@bad("settings is a dict", ConfigError, "Settings", "dict")
def _(world: World) -> None:
    shard_toy(world, settings={"overlap": True})
