"""Damage a checkpoint at random and load it, again and again: a program, so that a test sees its crash.

    python damage.py FOLDER SEED TRIALS

FOLDER is a checkpoint saved by two ranks. Each trial prints a line: the change, its file, and the result:
``detected``, ``missed`` or ``harmless`` (the same values in spite of it). The last line is ``done``.
"""

from __future__ import annotations

import random
import resource
import sys
import warnings
from pathlib import Path

import torch

from checkpoint.training import CheckpointTraining, DataPosition, State
from npuzero import comm
from npuzero.comm import World
from npuzero.errors import CheckpointError

#: An absurd amount of memory for so small a model.
SPARE_BYTES = 1 << 29


def main(folder: Path, seed: int, trials: int) -> None:
    _limit_memory()
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    sizes = [path.stat().st_size for path in files]

    def rank(world: World) -> None:
        chance = random.Random(seed)  # the same on all ranks; loading sets the generators of torch and of Python
        training = CheckpointTraining(world, "zero3", seed=1)
        expected = _load_damaged(training, folder)
        for _ in range(trials):
            # Half of the trials give each file the same chance, the rest a chance in proportion to its size.
            path = chance.choice(files) if chance.random() < 0.5 else chance.choices(files, sizes)[0]
            original = path.read_bytes()
            damaged, action = _damage_bytes(original, chance)
            world.exchange(None)
            if world.rank == 0:
                path.write_bytes(damaged)
            world.exchange(None)
            verdict = _load_verdict(training, folder, path.name, expected)
            world.exchange(None)
            if world.rank == 0:
                path.write_bytes(original)
                print(f"{path.name}: {action}: {verdict}", flush=True)
            world.exchange(None)
        assert _states_equal(_load_damaged(training, folder), expected)

    comm.run_threads(2, rank, timeout_s=60.0, limit_s=3600.0)
    print("done")


def _load_verdict(training: CheckpointTraining, folder: Path, name: str, expected: State) -> str:
    try:
        loaded = _load_damaged(training, folder)
    except CheckpointError as error:
        # Where no checksum protects the index, a changed name means a missing tensor.
        ours = (folder / "manifest.json").exists()
        named = name in str(error) or Path(name).stem in str(error) or (not ours and str(folder) in str(error))
        return "detected" if named else f"missed: {error} does not name the file"
    return "harmless" if _states_equal(loaded, expected) else "missed: other values"


def _load_damaged(training: CheckpointTraining, folder: Path) -> State:
    """Return all contents of the checkpoint; torch's checkpoints have neither positions nor random states."""
    ours = (folder / "manifest.json").exists()
    training.load(folder, data=DataPosition() if ours else None)
    return training.state()


def _states_equal(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _damage_bytes(raw: bytes, chance: random.Random) -> tuple[bytes, str]:
    at = chance.randrange(len(raw))
    if chance.random() < 0.2:
        return raw[:at], f"cut to {at}"
    changed = chance.choice([raw[at] ^ 1 << chance.randrange(8), chance.randrange(256)])
    changed = changed if changed != raw[at] else changed ^ 0xFF
    return raw[:at] + bytes([changed]) + raw[at + 1 :], f"byte {at} from {raw[at]} to {changed}"


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
