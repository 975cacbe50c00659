"""The JSON file of a benchmark suite, from which every figure can be derived again."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from npuzero.bench.harness import Result
from npuzero.bench.spread import median
from npuzero.config import check_keys, read_json
from npuzero.errors import ConfigError, StorageError

SCHEMA = 1


def format_command(arguments: Sequence[str] | None = None) -> str:
    """Return the command line of this process (or ``arguments`` after ``python``), for a record.

    Absolute paths are replaced by PATH: they are specific to this machine.
    """
    given = sys.orig_argv[1:] if arguments is None else arguments
    return shlex.join(["python", *(re.sub(r"(?:^|(?<==))/.*", "PATH", argument) for argument in given)])


@dataclass
class Record:
    """Hold the results of one suite in one run.

    Attributes:
        suite: ``"ops"``, ``"comm"``, ``"step"``, ``"peers"``, ``"install"``.
        command: repeats the run.
        machine: see :func:`npuzero.bench.machine_fingerprint`.
        date: start of the run, ISO 8601 in UTC.
        quick: a smoke run with meaningless figures.
    """

    suite: str
    command: str
    machine: dict[str, Any]
    date: str
    quick: bool
    results: list[Result]

    @classmethod
    def begin(cls, suite: str, command: str, machine: dict[str, Any], *, quick: bool = False) -> Record:
        """Begin an empty record with the current date."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(suite, command, machine, now, quick, [])

    def result(self, name: str) -> Result:
        """Return the result with the given name.

        Raises:
            ConfigError: it does not exist.
        """
        for result in self.results:
            if result.name == name:
                return result
        known = ", ".join(result.name for result in self.results) or "none"
        raise ConfigError(f"record {self.suite}", expected=f"one of {known}", got=repr(name), do="Name one of these.")

    def as_dict(self) -> dict[str, Any]:
        """Return the file's content: measurements, and the summaries derived from them."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "command": self.command,
            "date": self.date,
            "quick": self.quick,
            "machine": self.machine,
            "benchmarks": [benchmark_as_dict(result) for result in self.results],
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any], subject: str = "record") -> Record:
        """Return the record of a file's content. Summaries are not read; they are derived again.

        Raises:
            ConfigError: the schema differs, or keys are missing or unknown.
        """
        if content.get("schema") != SCHEMA:
            raise ConfigError(
                subject, expected=f"schema {SCHEMA}", got=repr(content.get("schema")), do="Take the figures anew."
            )
        keys = ("schema", "suite", "command", "date", "quick", "machine", "benchmarks")
        check_keys(subject, content, keys)
        try:
            results = [benchmark_from_dict(entry) for entry in content["benchmarks"]]
            told = {key: content[key] for key in ("suite", "command", "machine", "date", "quick")}
            return cls(**told, results=results)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                subject, expected=f"what schema {SCHEMA} has", got=f"{type(error).__name__}: {error}",
                do="Take the figures anew.",
            ) from error  # fmt: skip

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            StorageError: it cannot be written.
        """
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(_join_list_lines(json.dumps(self.as_dict(), indent=1)) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise StorageError(
                f"record {path}", expected="a file that can be written", got=str(error), do="Check the folder."
            ) from error

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record.

        Raises:
            ConfigError: the file does not exist, or is not a record of this schema.
        """
        return cls.from_dict(read_json(path), f"record {path.name}")


def benchmark_as_dict(result: Result) -> dict[str, Any]:
    """Return one benchmark's part of the file: raw times, and summaries for human readers."""
    contenders = {
        name: {
            "seconds": [_round_six_digits(value) for value in seconds],
            "calls": result.calls[name],
            "nbytes": result.nbytes[name],
            "values": result.values[name],
            "median_s": _round_six_digits(median(seconds)),
            "gb_per_s": _round_six_digits(result.gb_per_s(name)),
            "speedup": {key: _round_six_digits(value) for key, value in result.speedup(name).as_dict().items()},
        }
        for name, seconds in result.seconds.items()
    }
    return {
        "name": result.name,
        "title": result.title,
        "baseline": result.baseline,
        "checked": result.checked,
        "parameters": result.parameters,
        "ended_by": result.ended_by,
        "contenders": contenders,
    }


def benchmark_from_dict(entry: dict[str, Any]) -> Result:
    """Return the Result of one benchmark's part.

    Raises:
        KeyError, TypeError: the part is not valid.
    """
    contenders: dict[str, dict[str, Any]] = entry["contenders"]
    told = {key: entry[key] for key in ("name", "title", "baseline", "checked", "parameters", "ended_by")}
    return Result(
        **told,
        **{  # type: ignore[arg-type]
            key: {name: contender[key] for name, contender in contenders.items()}
            for key in ("seconds", "calls", "nbytes", "values")
        },
    )


def _join_list_lines(text: str) -> str:
    """Return JSON with each list of plain values on one line."""
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found.group().split()), text)


def _round_six_digits(value: float | None) -> float | None:
    """Round to six digits; None also for values that JSON cannot represent."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
