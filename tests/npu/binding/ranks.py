"""Starts ranks as processes on the fake device.

python -m npu.binding.ranks npu.binding.hccl_cases:check_every_verb ANSWER     what each runs, with a launcher's
variables
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from npu.fake import libraries

#: What ranks have to end by themselves when another has failed, and to say where they are when they are told to end.
_GRACE_S = 5.0
#: Longer than any run, which ends by `run_npu_ranks` alone: a rank that gives up knows neither what became of the
#: others nor
#: whether the machine has been at a standstill or busy elsewhere, which a collective's timeout takes for a dead rank.
_TIMEOUT_S = 3600


def run_npu_ranks(case: str, size: int, folder: Path, limit_s: float = 240.0, **variables: str) -> list[Any]:
    """What `module:function` of `npu.binding` returns on each of `size` ranks, called with the world.

    Fails with what all ranks have put out: one that waits in vain for another may well be the first to give up. What
    still runs after `limit_s`, or once a rank has failed, says where all of its threads are, and ends.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(libraries.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
        **{"LOCAL_WORLD_SIZE": str(size), "FAKE_HCCL_LOG": str(folder / "hccl.log")},
        **{"FAKE_HCCL_TIMEOUT_MS": str(_TIMEOUT_S * 1000), **variables},
    }
    ranks = []
    for rank in range(size):
        answer = folder / f"{rank}.json"
        command = [sys.executable, "-m", "npu.binding.ranks", f"npu.binding.{case}", str(answer)]
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"{rank}.txt").open("w") as output:
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        _wait_for_processes(ranks, limit_s, until_one_fails=True)
        if any(rank.returncode for rank in ranks):
            _wait_for_processes(ranks, _GRACE_S)
        late = [rank for rank in ranks if rank.poll() is None]
        for rank in late:
            rank.send_signal(signal.SIGABRT)
        _wait_for_processes(late, _GRACE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    texts = [
        f"rank {number} {'ran until it was ended' if rank in late else f'ended with {rank.returncode}'}:\n"
        + (folder / f"{number}.txt").read_text(errors="replace")
        for number, rank in enumerate(ranks)
    ]
    assert not any(rank.returncode for rank in ranks), "\n".join(texts)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _wait_for_processes(ranks: list[subprocess.Popen[bytes]], limit_s: float, until_one_fails: bool = False) -> None:
    """Wait until all have ended, or one has failed, if that is enough."""
    end = time.monotonic() + limit_s
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < end:
        if until_one_fails and any(codes):
            return
        time.sleep(0.02)


def _main(case: str, answer: str) -> None:
    faulthandler.enable()  # whatever ends it, a signal from outside included
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would stay in this folder
    libraries.load_fake_cann()
    import torch

    import npuzero
    from npuzero.device import npu

    npu.DRIVER = Path(os.devnull)
    torch.set_num_threads(1)
    module, _, function = case.partition(":")
    body = getattr(importlib.import_module(module), function)
    Path(answer).write_text(json.dumps(body(npuzero.init(timeout_s=_TIMEOUT_S))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
