"""The comparison of states on a disk: who takes part, that mapped states train as plain ones, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import plot
from benchmarks.peers import nvme, offloaded
from benchmarks.peers.environments import DEEPSPEED
from benchmarks.step.contenders import Steps, plain_steps
from benchmarks.step.workload import Workload, loss_of
from npuzero.bench import Record, Result

SMALL = Workload(dim=16, layers=2, heads=2, vocabulary=32, sequence=8, batch=2)


def test_deepspeed_has_its_environment_and_settings(tmp_path: Path) -> None:
    settings = list(nvme.candidates())
    assert len(settings) == len({str(each) for each in settings}) == 12
    entry = nvme.entry("deepspeed", tmp_path, settings[0])
    assert entry.python == str(DEEPSPEED.python) and entry.peer
    assert entry.variables["NPUZERO_NVME_PATHS"] == str(tmp_path)
    assert '"queue_depth": 8' in entry.variables[offloaded.TUNING]


def test_an_unknown_contender_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nvme.main(["--folder", ".", "--contenders", "npuzero,zenflow"])
    assert "zenflow" in capsys.readouterr().err


def trained(steps: Steps) -> Tensor:
    """All parameters after a few steps."""
    for step in range(4):
        loss_of(steps.model, SMALL.tokens(0, step)).backward()
        steps.update()
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in steps.model.parameters()])


@pytest.mark.parametrize(("precision", "apart"), [("fp32", 1e-6), ("bf16", 2e-4)])
def test_mapped_states_train_as_plain_ones(
    precision: str, apart: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))
    workload = Workload(**{**vars(SMALL), "precision": precision})
    plain = trained(plain_steps(workload.model().to(workload.dtype)))
    found = trained(offloaded.mapped()(workload.model(), workload))
    assert (found - plain).abs().max() <= apart
    first = torch.cat([parameter.detach().reshape(-1) for parameter in workload.model().parameters()])
    assert (found - first).abs().max() > 4 * apart, "they have been trained"
    assert list(tmp_path.iterdir()) == [], "files without names"


def test_the_picture_has_both_panels_and_says_how_far_others_are_behind(tmp_path: Path) -> None:
    def result(name: str, title: str, **seconds: float) -> Result:
        times = {who.replace("_", "-"): [value] * 5 for who, value in seconds.items()}
        no_values = dict.fromkeys(times)
        return Result(
            name,
            title,
            next(iter(times)),
            "",
            {},
            "",
            times,
            dict.fromkeys(times, 1),
            no_values,
            {w: {} for w in times},
        )

    update = result(
        "nvme/update-bf16-1", "update", npuzero_blocking=1.0, npuzero_8bit_blocking=0.4, deepspeed=2.5, mapped=4.0
    )
    step = result("nvme/step-bf16-1", "training step", **{"compute only": 0.5, "npuzero": 1.0, "deepspeed": 3.0})
    panels = plot.nvme({each.name: each for each in (step, update)})
    assert [panel.title for panel in panels] == ["update", "training step"]
    assert [row.goal for row in panels[0].rows] == [None, None, 2.0, 3.0]
    machine = {"cpu": "a processor", "cores": 2, "torch": "2", "commit": "abc"}
    Record("nvme", "", machine, "2026-01-01", False, [step, update]).write(tmp_path / "record.json")
    plot.main([str(tmp_path / "record.json"), "--out", str(tmp_path / "nvme.png")])
    assert (tmp_path / "nvme.png").read_bytes().startswith(b"\x89PNG")
    said = plot.finding({update.name: update})
    assert said == "Others update states on a disk in 2.50–4.00 times npuzero's time"
