"""Time the planner's answers: single questions, and an exhaustive search::

    python -m benchmarks.planning.table
    python -m benchmarks.planning.table --json > benchmarks/results/planner.json

Wall time and CPU time are reported: their difference shows the load of a shared machine. The first answer of a process
includes torch's imports for kernels on meta, and is listed separately.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from npuzero.bench import machine_fingerprint
from npuzero.plan import OFFLOADED, PRESETS, THINNED
from npuzero.planner import Cluster, TrainingJob, from_size
from npuzero.planner.advice import advise_on
from npuzero.planner.search import Choices, search_runs

#: Parameters, cluster, tokens of a sequence and of a step.
QUESTIONS = (
    (7 * 10**9, "8x910b-64g", 4096, 2**19),
    (13 * 10**9, "1xa100-80g", 2048, 2**17),
    (7 * 10**9, "64xa100-80g", 2048, 2**22),
    (70 * 10**9, "64xh100", 4096, 2**22),
)
#: All presets in two precisions: about 500 runs, each with its memory; the runs that are fastest for their plan, or
#: close to it, are timed.
EVERYTHING = Choices(presets=(*PRESETS, *OFFLOADED, *THINNED), precisions=("bf16", "bf16-8bit"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    first = time_answer(*QUESTIONS[0])
    found = {
        "machine": machine_fingerprint(),
        "first answer of a process": first,
        "answers": [time_answer(*question) for question in QUESTIONS],
        "everything": time_search(),
    }
    print(json.dumps(found, indent=2) if options.json else render_planner(found))


def time_answer(parameters: int, on: str, sequence: int, tokens: int) -> dict[str, Any]:
    """Return the time of an answer. The model is rebuilt, so that nothing is cached."""
    job = TrainingJob(from_size(parameters), Cluster.named(on), sequence, tokens)
    wall, cpu = time.perf_counter(), time.process_time()
    advice = advise_on(job)
    text = str(advice)
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    found = advice.found
    return {
        "parameters": parameters,
        "on": on,
        **_round_milliseconds(spent),
        "looked": found.looked,
        "timed": found.timed,
        "answer": text.splitlines()[0],
    }


def time_search() -> dict[str, Any]:
    """Return the time of a search that times every fitting run."""
    job = TrainingJob(from_size(7 * 10**9), Cluster.named("64xa100-80g"), 2048, 2**22)
    wall, cpu = time.perf_counter(), time.process_time()
    found = search_runs(job, EVERYTHING, every=True)
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return {**_round_milliseconds(spent), "looked": found.looked, "timed": found.timed}


def _round_milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def render_planner(found: dict[str, Any]) -> str:
    """Return the record as text."""
    rows = [("first in a process", found["first answer of a process"])]
    rows += [(f"{each['parameters'] / 1e9:.0f}B on {each['on']}", each) for each in found["answers"]]
    rows.append(("everything", found["everything"]))
    lines = [f"{'':22} {'wall':>8} {'cpu':>8} {'looked':>7} {'timed':>6}"]
    for name, row in rows:
        lines.append(f"{name:22} {row['wall_s']:7.2f}s {row['cpu_s']:7.2f}s {row['looked']:7} {row['timed']:6}")
    return "\n".join([*lines, *(each["answer"] for each in found["answers"])])


if __name__ == "__main__":
    main()
