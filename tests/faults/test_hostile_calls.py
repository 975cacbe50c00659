"""Direct calls of the extension: invalid ones raise TypeError or ValueError, and the process survives."""

from __future__ import annotations

import multiprocessing

import pytest

from faults.hostile_calls import CALLS, serve_hostile_calls

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Return each call's result. A process makes call after call; after a deadly one, the next process goes on."""
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
