"""torch_npu is there and CANN is not: nobody imports it unasked, and who asks is told why."""

from __future__ import annotations

import os
import subprocess
import sys

NEEDED = """
import sys
from pathlib import Path
import torch
import npuzero
from npuzero import device
from npuzero.info import info
assert "torch_npu" not in sys.modules
"""
DRIVER = "import npuzero.device.npu\nnpuzero.device.npu.DRIVER = Path('/dev/null')\n"


def run_without_fake(code: str, autoload: str = "0") -> subprocess.CompletedProcess[str]:
    """A process without the fake."""
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)


def test_without_a_driver_nothing_imports_it():
    done = run_without_fake(
        NEEDED + "assert str(device.choose()) == 'cpu'\n"
        "npuzero.zero(torch.nn.Linear(3, 3))\n"
        "print({item['what']: item['why'] for item in info()['missing']}['device npu'])\n"
        "assert 'torch_npu' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    assert "no Ascend driver" in done.stdout


def test_asking_for_an_npu_names_what_is_missing():
    done = run_without_fake(
        NEEDED + DRIVER + "try: device.get('npu')\nexcept npuzero.ConfigError as error: print(error)"
    )
    assert done.returncode == 0, done.stderr
    assert "libhccl.so" in done.stdout and "set_env.sh" in done.stdout


def test_the_trap_is_real():
    """Why messages and documents name TORCH_DEVICE_BACKEND_AUTOLOAD: importing torch is enough to fail."""
    done = run_without_fake("import torch", autoload="1")
    assert done.returncode != 0 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
