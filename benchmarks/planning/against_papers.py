"""Compare the planner's clock with published runs, uncalibrated and calibrated on one row::

    python -m benchmarks.planning.against_papers
    python -m benchmarks.planning.against_papers --json > benchmarks/results/published.json

Rows that are not judged are listed last, with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.planning.published import PublishedTable, count_ordered_pairs

#: The row of each table that calibrates one constant: the sustained part of the devices' peak.
CALIBRATION = {"internevo": "tp=1 zero1=8, 8", "narayanan2021": "18.4B"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = {name: compare_table(PublishedTable.named(name), CALIBRATION[name]) for name in PublishedTable.names()}
    print(json.dumps(found, indent=2) if options.json else "\n\n".join(map(render_published, found.values())))


def compare_table(table: PublishedTable, calibration: str) -> dict[str, Any]:
    """Return a table's rows with the clock's predictions, and their errors."""
    calibrated = table.calibrated(calibration)
    rows = [
        {"row": row.name, "published": row.published, "clock": round(table.predict(row), 1), "doubt": row.doubt}
        for row in table.rows
    ]
    right, pairs = count_ordered_pairs([(row.published, table.predict(row)) for row in table.judged])
    return {
        "table": table.name,
        "unit": table.unit,
        "source": table.source,
        "as it comes": _summarize_errors(table),
        f"calibrated on {calibration}": _summarize_errors(calibrated)
        | {"sustained": round(calibrated.cluster.device.sustained, 3)},
        "pairs that differ by more than 5 %": {"right": right, "of": pairs},
        "rows": rows,
        "missing": dict(table.missing),
    }


def _summarize_errors(table: PublishedTable) -> dict[str, float]:
    errors = [abs(error) for error in table.errors().values()]
    near = sum(error <= 0.05 for error in errors) / len(errors)
    return {"mean": round(statistics.mean(errors), 4), "most": round(max(errors), 4), "within 5 %": round(near, 3)}


def render_published(found: dict[str, Any]) -> str:
    """Return a comparison as text."""
    lines = [f"{found['table']} ({found['unit']}; {found['source']})"]
    for row in sorted(found["rows"], key=lambda row: bool(row["doubt"])):
        error = row["clock"] / row["published"] - 1
        doubt = f"  not judged: {row['doubt']}" if row["doubt"] else ""
        lines.append(f"  {row['row']:26} {row['published']:7,.0f} {row['clock']:9,.1f} {error:+7.1%}{doubt}")
    lines += [f"  {what}: {reason}" for what, reason in found["missing"].items()]
    lines += [f"{key}: {value}" for key, value in found.items() if isinstance(value, dict) and key != "missing"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
