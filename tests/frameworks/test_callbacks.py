"""Lightning's callbacks that freeze, average or swap parameters do under sharding what they do under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frameworks.toys import BOUND, ROOT, launch_torchrun, max_difference

pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

from frameworks.callback_ranks import CASES

RANKS = ROOT / "tests" / "frameworks" / "callback_ranks.py"
QUICK = ("thawed", "averaged")
REST = tuple(name for name in CASES if name not in QUICK)
every_case = pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in REST)])


@pytest.mark.world
@every_case
def test_they_do_what_they_do_under_ddp(name: str, cases: Callable[[str], Path]) -> None:
    """What is trained, what is validated, and what a checkpoint has for those who validate it."""
    found = torch.load(cases(name) / f"{name}.pt", weights_only=True)
    ddp, zero = found["ddp"], found["zero"]
    assert max_difference(zero["weights"], zero["begun"]) > 1e-3
    assert max_difference(zero["weights"], ddp["weights"]) < BOUND
    assert zero["validated"] == pytest.approx(ddp["validated"], abs=BOUND)
    assert zero["rates"] == ddp["rates"]


@pytest.mark.world
@every_case
def test_they_go_on_from_a_checkpoint(name: str, cases: Callable[[str], Path]) -> None:
    """As under DDP, which leaves frozen what had thawed; ``on_fit_start`` finds the checkpoint's weights."""
    found = torch.load(cases(name) / f"{name}.pt", weights_only=True)
    ddp = found["ddp resumed"]
    assert max_difference(ddp["begun"], found["ddp"]["begun"]) > 1e-3
    zero = found["resumed"]
    assert max_difference(zero["begun"], ddp["begun"]) < BOUND
    assert max_difference(zero["weights"], ddp["weights"]) < BOUND
    assert zero["rates"] == ddp["rates"]
    assert zero["validated"] == pytest.approx(ddp["validated"], abs=BOUND)


PROGRAM = """
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

import npuzero
from frameworks.lightning_ranks import RegressionModule
from frameworks.toys import build_regression_loader
from npuzero.lightning import ZeroStrategy

SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def fit(callbacks, zero=None, checkpoint=None, epochs=1):
    module = RegressionModule()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=ZeroStrategy(zero=zero), max_epochs=epochs, callbacks=callbacks,
        default_root_dir=sys.argv[1], **SILENT,
    )
    trainer.fit(module, build_regression_loader(), ckpt_path=checkpoint)
    return trainer, module


def refused(callback, zero):
    try:
        fit([callback], zero)
    except npuzero.ConfigError as error:
        assert type(callback).__name__ in str(error), error
        assert not [name for name in vars(callback) if name in ("_swap_models", "update_parameters", "setup")]
        return str(error)
    raise AssertionError(zero)


swa = StochasticWeightAveraging(swa_lrs=0.1)
assert "swap would round" in refused(EMAWeightAveraging(), {"precision": "bf16"})
assert "lag=1" in refused(EMAWeightAveraging(), {"plan": "delayed"})
assert "precision.gathers" in refused(swa, {"plan": "thin"})

trainer, module = fit([])
trainer.save_checkpoint(Path(sys.argv[1], "plain.ckpt"))
late = EMAWeightAveraging(update_starting_at_step=100)
_, resumed = fit([late], checkpoint=Path(sys.argv[1], "plain.ckpt"), epochs=2)
same = zip(npuzero.full_state_dict(module).values(), npuzero.full_state_dict(resumed).values())
assert all(torch.equal(one, other) for one, other in same), "an average that was never updated is the checkpoint's"
print("as it should be")
"""


def test_plans_that_round_or_lag_are_refused_and_a_late_average_begins_at_the_checkpoint(tmp_path: Path) -> None:
    """At once, by the name of the callback, whose methods are its own again."""
    (tmp_path / "program.py").write_text(PROGRAM)
    assert "as it should be" in launch_torchrun(tmp_path / "program.py", tmp_path / "run", ranks=1)
