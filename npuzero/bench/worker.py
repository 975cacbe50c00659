"""The worker side of a Team: serves one contender's rank, with lines of JSON on stdin and stdout.

    PYTHON worker.py FILE_OR_MODULE

Needs only Python, so that it also runs in environments without npuzero. FILE_OR_MODULE has a function ``make(rank,
size, options)`` that returns the work, an object with

    run()           one call of the measured work;
    prepare()       before each visit, outside the timing (optional), e.g. a barrier;
    synchronize()   wait for the device (optional);
    others          further methods, with keyword arguments and JSON results: see Team.ask.

The work's stdout is redirected to stderr, which the Team shows if the worker fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO


def main() -> int:
    # Import from the current folder, as `python -m` does, not from this file's folder, where modules have package
    # names.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = ["", *(folder for folder in sys.path if not folder or str(Path(folder).resolve()) != here)]
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        serve_team(sys.argv[1], channel)
    except BaseException as error:
        traceback.print_exc()
        send_line(channel, error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def serve_team(source: str, channel: TextIO) -> None:
    """Answer one line per line, until asked to quit or the Team has exited."""
    start = json.loads(sys.stdin.readline())
    make = load_work_module(source).make
    reset = reset_peak_memory()
    baseline_bytes = read_status_bytes()["VmRSS"]
    work = make(start["rank"], start["size"], start["options"])
    send_line(channel, answer="ready")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "quit":
            getattr(work, "close", lambda: None)()
            send_line(channel, answer="gone")
            return
        if asked["do"] == "run":
            send_line(channel, answer=time_calls(work, asked["count"]))
        elif asked["do"] == "memory":
            send_line(channel, answer=read_memory(baseline_bytes, reset))
        else:
            send_line(channel, answer=getattr(work, asked["do"])(**asked["arguments"]))


def send_line(channel: TextIO, **words: Any) -> None:
    """Send one line to the Team."""
    channel.write(json.dumps(words) + "\n")
    channel.flush()


def load_work_module(source: str) -> Any:
    """Load a module from a file path or by name."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {source}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def time_calls(work: Any, count: int) -> float:
    """Return the seconds per call."""
    getattr(work, "prepare", lambda: None)()
    synchronize = getattr(work, "synchronize", lambda: None)
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work.run()
    synchronize()
    return (time.perf_counter() - begin) / count


def read_memory(baseline_bytes: int, reset: bool) -> dict[str, Any]:
    """Return resident bytes: after importing the work's file but before making it, now, and the peak since then.

    ``peak_is_since_baseline`` is False if the system does not allow a process to reset its peak; then the peak may be
    from importing.
    """
    found = read_status_bytes()
    return {
        "baseline_bytes": baseline_bytes,
        "now_bytes": found["VmRSS"],
        "peak_bytes": found["VmHWM"],
        "shared_bytes": found.get("RssShmem", 0),
        "peak_is_since_baseline": reset,
    }


def read_status_bytes() -> dict[str, int]:
    """Return the sizes in /proc/self/status, by name."""
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def reset_peak_memory() -> bool:
    """Reset VmHWM if the system allows it; see proc(5)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
