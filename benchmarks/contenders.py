"""Display names of contenders, and descriptions of the records' machines and dates."""

from __future__ import annotations

from collections.abc import Sequence

from npuzero.bench import Record

#: Contenders by the names that their own users know.
_CALLED = {
    "ddp": "DDP",
    "ddp-autocast": "DDP under autocast",
    "ddp-shm": 'DDP on the backend "shm"',
    "fsdp2": "FSDP2",
    "fsdp2-keep": "FSDP2, reshard_after_forward=False",
    "fsdp2-shm": 'FSDP2 on the backend "shm"',
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "torch passes": "torch's passes",
    "deepspeed-1": "DeepSpeed, stage 1",
    "deepspeed-2": "DeepSpeed, stage 2",
    "deepspeed-3": "DeepSpeed, stage 3",
}


def contender_label(contender: str) -> str:
    """Return a contender's display name: a preset that can be typed, with the precision if it is not bf16."""
    preset, split, _ = contender.partition("-split")
    return f"{preset}, bf16-split" if split else _CALLED.get(contender, contender)


def describe_records(records: Sequence[Record], names: set[str]) -> str:
    """Describe machine, software, dates and commits of the records that hold one of the benchmarks, in a sentence."""
    held = [record for record in records if any(result.name in names for result in record.results)]
    machines = {(m["cpu"], m["cores"], m["isa"], m["torch"]) for m in (record.machine for record in held)}
    where = "; ".join(f"{cpu}, {cores} cores, {isa}, torch {torch}" for cpu, cores, isa, torch in sorted(machines))
    days = sorted({record.date[:10] for record in held})
    return f"Measured on {where}; {', '.join(days)}; commit {', '.join(record_commits(held))}."


def record_commits(records: Sequence[Record]) -> list[str]:
    """Return the commits of the records, with a + if sources had changed since."""
    return sorted({record.machine["commit"] or "a release" for record in records})
