"""The extension by hand: what makes no sense is a TypeError or a ValueError, and the process lives on."""

from __future__ import annotations

import multiprocessing

import pytest

from faults.hostile_calls import CALLS, serve_hostile_calls

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each call. A process makes one after another; where one kills it, the next begins after that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "npuzero"])
    found: dict[str, str] = {}
    while names := list(CALLS)[len(found) :]:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=serve_hostile_calls, args=(theirs, names), daemon=True)
        child.start()
        theirs.close()
        for name in names:
            try:
                found[name] = ours.recv() if ours.poll(LIMIT_S) else "it hangs"
            except EOFError:
                child.join()
                found[name] = f"the process ended with {child.exitcode}"
            if found[name].startswith(("it hangs", "the process")):
                break
        child.kill()
        child.join()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_is_refused(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "refused"
