"""Fine-tune a transformers model from its safetensors files, cut over any number of ranks, and hand it back.

    python examples/finetune/pretrained.py runs/pretrained               # a small Llama, trained a little, as files
    torchrun --standalone --nproc-per-node 2 examples/finetune/finetune.py runs/pretrained --out runs/finetuned
    python examples/finetune/finetune.py runs/pretrained --out runs/lora --lora 8        # PEFT's adapters
    python examples/finetune/finetune.py runs/pretrained --out runs/own --adapters 8     # those of adapters.py

The model is built on ``meta``; each rank reads the bytes that rest with it. What is left in ``--out`` is what
transformers' ``from_pretrained`` loads, or PEFT's with ``--lora``; losses are in ``result.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import adapters
import torch
from text import SENTENCES, batch_of
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig, AutoModelForCausalLM

import npuzero

Rename = Callable[[str], str | None]


def build(folder: Path, lora: int, own: int) -> tuple[Any, Rename, Rename]:
    """Return the model without data; the files' name for a tensor of it, and the name it is exported by."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        if own:
            adapters.adapt(model, own)
            return model, adapters.in_base, adapters.in_adapters
        if not lora:
            return model, str, str
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"))

    def in_base(name: str) -> str | None:
        return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")

    def in_adapter(name: str) -> str | None:
        return name.replace(".default", "") if "lora_" in name else None

    return adapted, in_base, in_adapter


def initializer(model: Any) -> Callable[[torch.nn.Module], None]:
    """Return what fills what no file has: adapters by their own rule, rotary frequencies by transformers'."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def initialize(module: Any) -> None:
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", init_lora_weights=True)
        elif isinstance(module, adapters.Adapted):
            module.reset_parameters()
        else:
            base._init_weights(module)

    return initialize


@record
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a transformers model under ZeRO.")
    parser.add_argument("pretrained", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("--out", type=Path, default=Path("runs/finetuned"), help="folder for the result")
    parser.add_argument(
        "--preset",
        default="zero3",
        help=f"one of {', '.join((*npuzero.PRESETS, *npuzero.OFFLOADED, *npuzero.THINNED))}",
    )
    parser.add_argument("--precision", default=None, help=f"{', '.join(npuzero.PRECISIONS)}; default: as it is")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--lora", type=int, default=0, metavar="RANK", help="train PEFT's adapters of this rank only")
    only.add_argument("--adapters", type=int, default=0, metavar="RANK", help="train those of adapters.py only")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)

    world = npuzero.init()
    torch.manual_seed(0)
    model, in_files, in_export = build(options.pretrained, options.lora, options.adapters)
    weights = npuzero.Weights(options.pretrained, rename=in_files)
    npuzero.zero(
        model,
        plan=options.preset,
        precision=options.precision,
        weights=weights,
        initialize=initializer(model),
        settings=npuzero.Settings(strict=True),  # one rank refuses what several would
    )
    optimizer = npuzero.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    losses = []
    for step in range(options.steps):
        tokens = batch_of(SENTENCES, options.batch, step * world.size + world.rank).to(world.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    by_rank = world.exchange(losses)

    single = "adapter_model.safetensors" if options.lora else "adapters.safetensors" if options.adapters else ""
    npuzero.export(model, options.out / single, rename=in_export)
    if world.rank == 0:
        if not options.adapters:  # whose configuration is the base's
            config = model.peft_config["default"] if options.lora else model.config
            config.save_pretrained(options.out)
        mean = [sum(ranks) / len(ranks) for ranks in zip(*by_rank, strict=True)]
        (options.out / "result.json").write_text(json.dumps({"losses": mean, "ranks": world.size}) + "\n")
        print(f"loss {mean[0]:.3f} -> {mean[-1]:.3f}; left in {options.out / single}")


if __name__ == "__main__":
    main()
