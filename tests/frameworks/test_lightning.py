"""Lightning's door: the weights of DistributedDataParallel, checkpoints that go on, and what is refused.

A strategy starts torch.distributed: what fits runs in processes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import npuzero
from frameworks.toys import BOUND, ROOT, build_framework_net, launch_torchrun, max_difference

pytest.importorskip("lightning")

from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry

from frameworks.lightning_ranks import CASES
from npuzero.lightning import ZeroStrategy
from test_docstrings import find_example

RANKS = ROOT / "tests" / "frameworks" / "lightning_ranks.py"
QUICK = ("folders",)
REST = tuple(name for name in CASES if name not in QUICK)
every_case = pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in REST)])


@pytest.mark.world
@every_case
def test_two_ranks_train_as_under_ddp(name: str, cases: Callable[[str], Path]) -> None:
    """Schedules, accumulation, clipping, mixed precision, validation and early stopping are Lightning's."""
    found = torch.load(cases(name) / f"{name}.pt", weights_only=True)
    ddp, zero = found["ddp"], found["zero"]
    begun = {name: value for name, value in build_framework_net().state_dict().items() if "tracked" not in name}
    assert max_difference({name: zero["weights"][name] for name in begun}, begun) > 1e-3
    assert max_difference(ddp["weights"], zero["weights"]) < BOUND
    assert zero["told"] == pytest.approx(ddp["told"], abs=BOUND)
    assert zero["validated"] == pytest.approx(ddp["validated"], abs=BOUND)
    assert zero["rates"] == ddp["rates"]
    assert zero["epochs"] == ddp["epochs"] == 3, "of five, by early stopping"


@pytest.mark.world
@every_case
def test_a_second_trainer_goes_on_from_a_checkpoint(name: str, cases: Callable[[str], Path]) -> None:
    """To the bit from one's own; from a file of DistributedDataParallel's within what both differ."""
    found = torch.load(cases(name) / f"{name}.pt", weights_only=True)
    assert max_difference(found["resumed"]["weights"], found["zero"]["weights"]) == 0
    assert max_difference(found["taken over"]["weights"], found["ddp"]["weights"]) < BOUND
    assert found["resumed"]["rates"] == found["zero"]["rates"] and found["resumed"]["epochs"] == 3


@pytest.mark.world
@pytest.mark.slow
def test_one_file_is_what_load_from_checkpoint_reads(cases: Callable[[str], Path]) -> None:
    """Of the same names as one of DistributedDataParallel's, with the state that torch's optimizer has."""
    ours, theirs = (
        torch.load(cases("files") / f"files.{kind}" / "last.ckpt", weights_only=False) for kind in ("zero", "ddp")
    )
    assert ours.keys() == theirs.keys()
    assert max_difference(ours["state_dict"], theirs["state_dict"]) < BOUND
    mine, plain = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (ours, theirs))
    assert mine.keys() == plain.keys()
    for number in plain:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.allclose(mine[number][key], plain[number][key], atol=1e-6)


SPAWNED = """
import sys
import torch
from frameworks.lightning_ranks import LightningCase, RegressionModule, build_regression_loader, fit_and_validate
from frameworks.lightning_ranks import build_lightning_trainer
import npuzero.lightning

strategy, folder, checkpoint, devices = sys.argv[1], sys.argv[2], sys.argv[3] or None, int(sys.argv[4])
epochs = 1 if checkpoint is None else 2
trainer = build_lightning_trainer(strategy, LightningCase(), folder, epochs=epochs, devices=devices)
module = RegressionModule()
found = fit_and_validate(trainer, module, checkpoint)
trainer.save_checkpoint(f"{folder}/after.ckpt")
trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
path = f"{folder}/weights.ckpt"
again = trainer.validate(RegressionModule(), build_regression_loader(), ckpt_path=path, verbose=False)
assert again[0]["held_out"] == found["validated"], again
if trainer.is_global_zero:
    torch.save(found, f"{folder}/found.pt")
    print("ranks", trainer.world_size)
"""


@pytest.mark.world
@pytest.mark.slow
def test_lightning_starts_the_ranks_itself_and_one_goes_on_from_two(tmp_path: Path) -> None:
    """By its name in the registry, and from a checkpoint that a program saved after training; as under DDP."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    found = {}
    for strategy in ("ddp", "npuzero"):
        two, one = tmp_path / strategy / "two", tmp_path / strategy / "one"
        assert "ranks 2" in launch_torchrun(program, strategy, two, "", 2, ranks=1)
        assert "ranks 1" in launch_torchrun(program, strategy, one, two / "after.ckpt", 1, ranks=1)
        found[strategy] = [torch.load(folder / "found.pt", weights_only=True) for folder in (two, one)]
    for ours, theirs in zip(found["npuzero"], found["ddp"], strict=True):
        assert max_difference(ours["weights"], theirs["weights"]) < BOUND
        assert (ours["epochs"], ours["rates"]) == (theirs["epochs"], theirs["rates"])
    two, one = found["npuzero"]
    assert max_difference(one["weights"], two["weights"]) > 1e-3 and one["rates"] == [pytest.approx(1e-2 * 0.8**2)]


PACKAGE = """
import pytorch_lightning
import npuzero.lightning

assert issubclass(npuzero.lightning.ZeroStrategy, pytorch_lightning.strategies.DDPStrategy)
assert "npuzero" in pytorch_lightning.strategies.StrategyRegistry
print("of pytorch_lightning")
"""


@pytest.mark.slow
def test_the_strategy_is_for_the_package_that_a_program_has_imported(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    (tmp_path / "program.py").write_text(PACKAGE)
    assert "of pytorch_lightning" in launch_torchrun(tmp_path / "program.py", ranks=1)


def test_it_is_in_the_registry() -> None:
    assert isinstance(StrategyRegistry.get("npuzero"), ZeroStrategy)


def test_arguments_of_ddp_are_refused() -> None:
    with pytest.raises(npuzero.ConfigError, match="got find_unused_parameters"):
        ZeroStrategy(find_unused_parameters=True)
    with pytest.raises(npuzero.ConfigError, match="got ddp_comm_hook"):
        ZeroStrategy(ddp_comm_hook=print)
    with pytest.raises(npuzero.ConfigError, match="as a mapping"):
        ZeroStrategy(zero=3)


def test_the_loss_scale_is_npuzeros_with_the_settings_of_torchs() -> None:
    strategy = ZeroStrategy()
    strategy.precision_plugin = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7, backoff_factor=0.25)
    )
    scaler = strategy.precision_plugin.scaler
    assert isinstance(scaler, npuzero.LossScaler)
    scaler.scale(torch.ones(()))
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_backoff_factor()) == (512.0, 7, 0.25)


@pytest.mark.slow
def test_the_example_of_its_docstring_runs(tmp_path: Path) -> None:
    before = (
        "from lightning import Trainer\n"
        "from frameworks.lightning_ranks import RegressionModule, build_regression_loader\n"
        f"import os\nfrom npuzero.lightning import ZeroStrategy\nos.chdir({str(tmp_path)!r})\n"
        "module, loader = RegressionModule(), build_regression_loader()\n"
    )
    (tmp_path / "program.py").write_text(before + find_example(ZeroStrategy) + "\nprint(trainer.global_step, 'steps')")
    assert "12 steps" in launch_torchrun(tmp_path / "program.py", ranks=1)
