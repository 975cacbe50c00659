"""Starts ranks as processes on the fake device.

python -m npu.binding.ranks npu.binding.hccl_cases:verbs ANSWER     what each runs, with a launcher's variables
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from npu.fake import libraries


def run(case: str, size: int, folder: Path, limit_s: float = 100.0, **variables: str) -> list[Any]:
    """What `module:function` of `npu.binding` returns on each of `size` ranks, called with the world.

    Fails with the first output of a rank that failed; whatever runs after `limit_s` is killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(libraries.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
        **{"LOCAL_WORLD_SIZE": str(size), "FAKE_HCCL_LOG": str(folder / "hccl.log"), **variables},
    }
    ranks = []
    for rank in range(size):
        answer = folder / f"{rank}.json"
        command = [sys.executable, "-m", "npu.binding.ranks", f"npu.binding.{case}", str(answer)]
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"{rank}.txt").open("w") as output:
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + limit_s
    try:
        for rank in ranks:
            rank.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for rank in ranks:
            rank.kill()
    for number, rank in enumerate(ranks):
        output = (folder / f"{number}.txt").read_text()
        assert rank.wait() == 0, f"rank {number} ended with {rank.returncode}:\n{output}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _main(case: str, answer: str) -> None:
    libraries.load()
    import torch

    import npuzero
    from npuzero.device import npu

    npu.DRIVER = Path(os.devnull)
    torch.set_num_threads(1)
    module, _, function = case.partition(":")
    body = getattr(importlib.import_module(module), function)
    Path(answer).write_text(json.dumps(body(npuzero.init(timeout_s=60))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
