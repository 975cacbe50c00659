"""The training step under npuzero and its peers, interleaved in one run. From the repository's root, or installed:

    python -m benchmarks.peers --out build/peers-batch4.json              # about 9 minutes on two cores
    python -m benchmarks.peers --batch 1 --out build/peers-batch1.json
    python -m benchmarks.peers --contenders zero2,ddp,deepspeed-2 --rounds 3
    python -m benchmarks.peers --install-only

The first run creates a virtual environment for each kind of peer in build/peers (minutes, some 2 GB). If the plain
package index serves CUDA builds of torch, name the index of CPU builds: ``--pip "--index-url URL"``. A peer that cannot
be installed, does not start or has different losses is listed with the reason, in the table and in the record.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from benchmarks.peers import contenders
from benchmarks.peers.environments import DEEPSPEED, TORCH, NotInstalled, PeerEnvironment
from benchmarks.step.compare import COMPUTE, ComparisonEntry, add_comparison_options, preset_entry, run_comparison
from benchmarks.step.contenders import PRESETS

OURS = ("zero0", "zero2", "zero3", "zero3-split")


def peer_entry(name: str) -> ComparisonEntry:
    """Return a peer in its environment."""
    environment = environment_of(name)
    return ComparisonEntry(
        name,
        f"{contenders.__name__}:{name}",
        python=str(environment.python),
        peer=True,
        variables=environment.variables,
    )


def environment_of(name: str) -> PeerEnvironment:
    """Return the environment of a peer."""
    return DEEPSPEED if name.startswith("deepspeed") else TORCH


def main() -> None:
    known = (*OURS, *contenders.CONTENDERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=known, help="with commas")
    parser.add_argument("--pip", type=shlex.split, default=[], help="further arguments of pip install")
    parser.add_argument("--install-only", action="store_true", help="make the environments and end")
    add_comparison_options(parser)
    parser.set_defaults(rounds=15, seconds=270.0)
    options = parser.parse_args()
    unknown = set(options.contenders) - {*known, *PRESETS}
    if unknown:
        parser.error(f"no such contenders: {', '.join(sorted(unknown))}; there are {', '.join(known)}")

    peers = [name for name in options.contenders if name in contenders.CONTENDERS]
    missing: dict[str, str] = {}
    made: dict[str, Any] = {}
    # If an environment cannot be created, its peers are missing; the run continues.
    for environment in dict.fromkeys(map(environment_of, peers)):
        try:
            made[environment.name] = environment.ensure(options.pip)
        except NotInstalled as reason:
            missing |= {name: str(reason) for name in peers if environment_of(name) is environment}
    if options.install_only:
        parser.exit(len(missing) > 0, "".join(f"{name}: {reason}\n" for name, reason in missing.items()))
    entries = [
        preset_entry(name) if name not in contenders.CONTENDERS else peer_entry(name)
        for name in options.contenders
        if name not in missing
    ]
    run_comparison("peers", [COMPUTE, *entries], options, missing=missing, parameters={"environments": made})


if __name__ == "__main__":
    main()
