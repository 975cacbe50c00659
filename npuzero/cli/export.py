"""``npuzero export``: write the unsharded weights of a checkpoint as safetensors files, without the model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from npuzero.checkpoint.weight_files.export import FILE_BYTES
from npuzero.checkpoint.weight_files.export_checkpoint import export_checkpoint
from npuzero.cli.arguments import parse_number
from npuzero.plan import DTYPES

_EPILOG = """\
examples:
  npuzero export runs/a weights                      the last complete checkpoint of a run
  npuzero export runs/a/step-00000500 weights --dtype bf16

Reads a tensor at a time. The files are those that transformers loads: model.safetensors, or several with an index."""


def add_export_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="the weights in a checkpoint as safetensors files",
        description="Write the unsharded weights in a checkpoint as safetensors files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder, or one file named *.safetensors")
    parser.add_argument(
        "--dtype", choices=("keep", *DTYPES), default="keep", help="of floating tensors (keep: the float32 masters)"
    )
    parser.add_argument(
        "--file-bytes", type=parse_number, default=FILE_BYTES, metavar="N", help=f"largest file ({FILE_BYTES:.0e})"
    )
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> str:
    """Return the command's output."""
    facts = export_checkpoint(options.checkpoint, options.out, DTYPES.get(options.dtype), options.file_bytes)
    numel = sum(math.prod(shape) for _, _, shape in facts)
    return f"{options.out}: {len(facts)} tensors, {numel:,} elements"
