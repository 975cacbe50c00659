"""Check the docstrings: each begins with a verb; public names have an example, and it runs."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from npuzero import checkpoint, parallel, schedules
from npuzero.compat import internevo

ROOT = Path(__file__).resolve().parent.parent

#: The verbs that docstrings begin with. Add the one you need: no program can recognize a verb.
VERBS = frozenset(
    re.findall(
        r"[\w-]+",
        """
        Accept Add Align Allocate Answer Append Apply Arrange Ask Average Await Be Begin Break Bring Build Call Carry
        Cast Change Check Choose Clear Clip Close Collect Combine Compare Compile Complete Compose Compute Connect
        Convert Copy Count Create Cut Decode Define Delete Derive Describe Detach Digest Disable Divide Do Draw
        Drop Enable Encode End Ensure Erase Estimate Evaluate Exchange Expand Explain Export Extend Fail Fill
        Filter Find Finish Follow Forget Format Forward Free Gather Generate Give Go Group Guard Handle Have
        Hold Identify Import Initialize Insert Install Iterate Join Keep Know Launch Lay Leave Lend Let List
        Load Locate Look Make Map Mark Match Measure Meet Merge Move Multiply Name Note Observe Open Order Pack Parse
        Pass Pause Pickle Place Plot Point Predict Prepare Present Print Probe Process Provide Push Put Quantize Queue
        Quote Raise Read Receive Record Recover Reduce Refer Refuse Register Release Remember Remove Render Repeat
        Replace Report Represent Reset Resolve Restart Restore Resume Return Round Run Save Say Scale Scatter
        Search Select Send Serve Set Shard Share Show Skip Sort Split Stand Start Step Stop Store Sum Summarize Swap
        Take Tell Time Trace Train Translate Treat Try Turn Undo Unpack Unscale Unshard Update Use Validate Verify
        View Visit Wait Walk Warn Watch Wrap Write Yield Zero
        All-gather All-reduce Broadcast Hook Patch Prefetch Reduce-scatter Reshard Slice Subtract
    """,
    )
)


def package_docstrings() -> Iterator[tuple[str, str]]:
    """Return the place and text of each docstring of a class or function in the package."""
    for path in sorted((ROOT / "npuzero").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", text


def test_they_begin_with_a_verb():
    found = dict(package_docstrings())
    assert len(found) > 1000, "the package was not found"
    odd = {place: text.splitlines()[0] for place, text in found.items() if text.split()[0].rstrip(",:.") not in VERBS}
    assert not odd, f"begin with a verb in the imperative, or add it to VERBS if it is one: {odd}"


def public_objects() -> dict[str, Any]:
    """Return the public callables by name. Errors are not called; the root of their tree shows how to catch them."""
    named = [(f"npuzero.{name}", getattr(npuzero, name)) for name in npuzero.__all__]
    named += [(f"checkpoint.{name}", getattr(checkpoint, name)) for name in checkpoint.__all__]
    named += [(f"parallel.{name}", getattr(parallel, name)) for name in parallel.__all__]
    named += [(f"schedules.{name}", getattr(schedules, name)) for name in schedules.__all__]
    named += [(f"internevo.{name}", getattr(internevo, name)) for name in internevo.__all__]
    # Programs do not construct these: calls return or take them.
    given = {"CutTensor", "InitializedEngine", "InitializedTraining", "Loaded", "Saving", "Stateful"}
    return {
        name: each
        for name, each in named
        if callable(each)
        and each.__name__ not in given
        and not (isinstance(each, type) and issubclass(each, npuzero.NpuZeroError) and each is not npuzero.NpuZeroError)
    }


def find_example(each: Any) -> str | None:
    """Return the code of the docstring's example; None if it has none."""
    found = re.search(r"^Example::\n\n((?: {4}.*\n?|\n)+)", inspect.getdoc(each) or "", re.MULTILINE)
    return found and textwrap.dedent(found[1])


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """Return the names examples use, on one rank: the plain ``net``, the sharded ``model``, and a step's parts."""
    world = npuzero.init()
    net, sharded = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(world.device) for _ in range(2))
    model = npuzero.zero(sharded, stage=3)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8, device=world.device)

    def train_step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    loss = model(x).square().mean()
    yield {"torch": torch, "nn": nn, "npuzero": npuzero, **locals()}
    world.close()


@pytest.mark.parametrize("name", public_objects())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's checkpoint, of one process
def test_an_example_runs(name, names, tmp_path, monkeypatch):
    code = find_example(public_objects()[name])
    assert code, f"{name}: end its docstring with a block 'Example::' that shows a call"
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "compat" / "internevo" / "configs" / "7B_sft.py", tmp_path)
    exec(compile(code, f"<example of {name}>", "exec"), names)
