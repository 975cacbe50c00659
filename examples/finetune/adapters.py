"""LoRA written by hand (Hu et al. 2021), for who has adapters of his own: their names in files, and their merge.

    torchrun --standalone --nproc-per-node 2 examples/finetune/finetune.py runs/pretrained --out runs/own --adapters 8
    python examples/finetune/adapters.py runs/pretrained runs/own/adapters.safetensors runs/merged

The first trains adapters and leaves a file of them; the second adds them to the base's files, a file at a time, under
the base's names. What it leaves is what ``from_pretrained`` loads, without this class.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SCALE = 2.0
THIN = ("down", "up")


class Adapted(nn.Module):
    """A frozen linear layer, and beside it the product of two thin matrices, which train."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    def reset_parameters(self) -> None:
        """Begin as the base alone: ``zero()`` calls this for what is on meta and in no file."""
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        thin = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return nn.functional.linear(x, self.base.weight, self.base.bias) + SCALE * thin


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze ``model``, and put an :class:`Adapted` in the place of each linear layer of its repeated blocks."""
    model.requires_grad_(False)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]
    for name in linear:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(model.get_submodule(name), rank))


def in_base(name: str) -> str | None:
    """Return what the base's files call the model's tensor ``name``; None for an adapter, which they have not."""
    return None if name.endswith(THIN) else name.replace(".base.", ".")


def in_adapters(name: str) -> str | None:
    """Return what the file of adapters calls the model's tensor ``name``; None for the base, which it has not."""
    return name if name.endswith(THIN) else None


def merge(base: Path, adapters: Path, out: Path) -> None:
    """Copy the folder ``base`` to ``out``, with ``weight + SCALE * up @ down`` for each weight that has adapters.

    Raises:
        KeyError: adapters of a weight that is not in ``base``.
    """
    thin = load_file(adapters)
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for path in sorted(base.glob("*.safetensors")):
        weights = load_file(path)
        for name, weight in weights.items():
            down, up = (thin.pop(f"{name.removesuffix('.weight')}.{part}", None) for part in THIN)
            if down is not None and up is not None:
                weights[name] = (weight.float() + SCALE * (up.float() @ down.float())).to(weight.dtype)
        save_file(weights, out / path.name, metadata={"format": "pt"})
    if thin:
        raise KeyError(f"adapters of weights that {base} has not: {', '.join(thin)}")


if __name__ == "__main__":
    merge(*map(Path, sys.argv[1:4]))
    print(f"{sys.argv[3]} is what from_pretrained() loads")
