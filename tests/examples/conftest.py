"""The examples are scripts beside their modules: make the modules importable as the scripts see them."""

from __future__ import annotations

import sys
from pathlib import Path

GPT_FOLDER = Path(__file__).parents[2] / "examples" / "gpt"
sys.path.insert(0, str(GPT_FOLDER))
