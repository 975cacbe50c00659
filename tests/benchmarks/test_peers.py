"""The peers' comparison: who takes part, and what becomes of those that cannot."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from benchmarks.peers import __main__ as peers
from benchmarks.peers import environments, kernels
from benchmarks.peers.environments import NotInstalled, PeerEnvironment
from npuzero.bench import Effort
from npuzero.bench.suites.updates import torch_adam_factory
from npuzero.errors import BenchmarkError


def test_every_peer_has_an_environment_of_its_kind():
    from benchmarks.peers.contenders import CONTENDERS

    for name in CONTENDERS:
        entry = peers.peer_entry(name)
        assert entry.peer and entry.contender == f"benchmarks.peers.contenders:{name}"
        assert ("deepspeed" in entry.python) == name.startswith("deepspeed")


def test_an_unknown_contender_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers", "--contenders", "zero2,horovod"])
    with pytest.raises(SystemExit):
        peers.main()
    assert "horovod" in capsys.readouterr().err


def test_a_kernel_that_is_not_there_is_missing_with_the_reason(monkeypatch):
    def refuses():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "deepspeed_cpu_adam", refuses)
    told = kernels.MixedStepWork().measure(1000, asdict(Effort.quick()))
    assert told["parameters"]["missing"] == {kernels.ADAM: "RuntimeError: no compiler"}
    assert kernels.ADAM not in told["contenders"]


def test_a_peers_adam_takes_part_in_the_mixed_step(monkeypatch):
    monkeypatch.setattr(kernels, "deepspeed_cpu_adam", lambda: torch_adam_factory(torch.optim.AdamW, foreach=True))
    told = kernels.MixedStepWork().measure(1000, asdict(Effort.quick()))
    assert not told["parameters"]["missing"]
    assert "to the bit" in told["checked"] and kernels.ADAM in told["contenders"]
    wrong = torch_adam_factory(torch.optim.Adam, fused=True)  # decays by the gradient
    monkeypatch.setattr(kernels, "deepspeed_cpu_adam", lambda: wrong)
    with pytest.raises(BenchmarkError, match=kernels.ADAM):
        kernels.MixedStepWork().measure(1000, asdict(Effort.quick()))


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_says_why_and_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    with pytest.raises(NotInstalled, match="no-such-package-at-all"):
        PeerEnvironment("none", (("--no-index", "no-such-package-at-all"),)).ensure()
    used = "import os; assert 'extensions' in os.environ['TORCH_EXTENSIONS_DIR']"
    made = PeerEnvironment("none", (("--no-index", "pip"),), used).ensure()
    assert made["install_s"] > made["first_use_s"] > 0
    assert PeerEnvironment("none", (("--no-index", "pip"),), used).ensure() == made
    with pytest.raises(NotInstalled, match="ZeroDivisionError"):
        PeerEnvironment("none", (("--no-index", "pip"),), "1 / 0").ensure()
