"""Which mistakes do the tests notice? ``python -m tests.mutants --all``, or with words of what some break."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from .mutant import ROOT, PackageMutant, kill_mutant, tests_pass
from .table import MUTANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="run those that break something with one of these words, or a file")
    parser.add_argument("--all", action="store_true", help="run all of them")
    parser.add_argument("-j", type=int, default=1, help="so many at a time")
    chosen = parser.parse_args()
    mutants = [m for m in MUTANTS if chosen.all or any(word in f"{m.file}: {m.breaks}" for word in chosen.words)]
    if not mutants:
        for mutant in MUTANTS:
            print(f"{mutant.file}: {mutant.breaks}")
        return 0
    for slow in sorted({mutant.slow for mutant in mutants}):
        tests = dict.fromkeys(test for mutant in mutants if mutant.slow is slow for test in mutant.tests)
        if not tests_pass(tests, ROOT, slow=slow, limit_s=1800.0):
            print(f"some of these fail without any mutant, and so tell nothing: {' '.join(map(repr, tests))}")
            return 2
    with ThreadPoolExecutor(chosen.j) as pool:
        alive = [mutant for mutant, dead in zip(mutants, pool.map(_report_mutant, mutants), strict=True) if not dead]
    slow_alone = sum(mutant.slow for mutant in mutants if mutant not in alive)
    print(
        f"{len(mutants)} mutants: {len(mutants) - len(alive) - slow_alone} killed by quick tests, {slow_alone} by slow "
        f"ones alone, {len(alive)} alive"
    )
    return bool(alive)


def _report_mutant(mutant: PackageMutant) -> bool:
    begin = time.monotonic()
    dead = kill_mutant(mutant)
    told = f"{'killed' if dead else 'ALIVE '} {time.monotonic() - begin:4.0f} s  {mutant.file}: {mutant.breaks}"
    print(told, flush=True)
    return dead


if __name__ == "__main__":
    raise SystemExit(main())
