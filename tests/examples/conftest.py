"""The examples are scripts beside their modules: make the modules importable as the scripts see them."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "gpt"), str(EXAMPLES / "finetune")]
