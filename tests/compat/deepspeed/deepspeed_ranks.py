"""One rank of real DeepSpeed on its CPU accelerator, a process of its own: trains a case, and writes its masters."""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from compat.deepspeed.reference import DenseGPT, GridCase, train_engine_steps
from world.toy import build_seeded_model


def main(case: GridCase, out: Path) -> None:
    """Train, and write the masters and norms on rank 0."""
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled: Gloo and torch's Adam are there
    deepspeed.init_distributed("gloo")
    config = case.config()
    config["optimizer"]["params"] = {**config["optimizer"]["params"], "torch_adam": True}
    engine, *_ = deepspeed.initialize(model=build_seeded_model(make=case.make), config=config)
    norms = list(train_engine_steps(engine, case, dist.get_rank()))
    masters = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter.numel() + getattr(parameter, "ds_numel", 0):
            found = safe_get_full_fp32_param(parameter)
            masters[name] = (parameter.detach().float() if found is None else found).clone()
    if dist.get_rank() == 0:
        torch.save((masters, norms), out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    stage, dtype, accumulation, clip, path = sys.argv[1:]
    main(GridCase(int(stage), dtype, int(accumulation), float(clip), make=DenseGPT, wide=True), Path(path))
