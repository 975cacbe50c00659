"""Records: a round trip, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch

from npuzero.bench import Contender, Effort, Record, format_command, machine_fingerprint, run_benchmark
from npuzero.bench.harness import Benchmark
from npuzero.errors import ConfigError, StorageError


def sample_record() -> Record:
    made = Record.begin("ops", "npuzero bench ops", machine_fingerprint(), quick=True)
    seconds = iter([1.0, 2.0, 3.0, 5.0] * 9)
    contenders = [Contender(name, lambda count: next(seconds), 10, {"peak_bytes": 3}) for name in ("a", "b")]
    effort = Effort(least_rounds=3, most_rounds=3)
    made.results.append(run_benchmark(Benchmark("x/y", "X", contenders, "a", lambda: "equal", {"n": 1}), effort))
    return made


def test_a_record_comes_back_as_it_was(tmp_path):
    made = sample_record()
    made.write(tmp_path / "new" / "ops.json")
    found = Record.read(tmp_path / "new" / "ops.json")
    assert found == made
    assert found.result("x/y").speedup("b") == made.result("x/y").speedup("b")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ops.json"]


def test_the_fingerprint_says_what_figures_depend_on():
    facts = machine_fingerprint()
    assert facts["torch"] == torch.__version__ and facts["cores"] >= 1 and facts["memory_bytes"] > 1 << 28
    assert set(facts) >= {"cpu", "isa", "threads", "system", "npuzero", "commit", "device", "load"}
    assert json.loads(json.dumps(facts)) == facts


def change_nested_value(content, path, value):
    *way, last = path
    for key in way:
        content = content[key]
    if value is None:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 0, "expected schema 1; got 0"),
        (["schema"], None, "expected schema 1; got None"),
        (["extra"], 1, "got 'extra'"),
        (["machine"], None, "KeyError: 'machine'"),
        (["benchmarks", 0, "checked"], None, "KeyError: 'checked'"),
        (["benchmarks", 0, "contenders", "a", "seconds"], None, "KeyError: 'seconds'"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, path, value, message):
    content = sample_record().as_dict()
    change_nested_value(content, path, value)
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"record x\.json") as caught:
        Record.read(tmp_path / "x.json")
    assert message in str(caught.value)


def test_a_record_that_cannot_be_written_leaves_no_part_of_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        sample_record().write(tmp_path / "file" / "ops.json")


def test_an_unknown_result_is_named():
    with pytest.raises(ConfigError, match=r"expected one of x/y; got 'z'"):
        sample_record().result("z")


def test_the_command_of_a_record_names_no_path_of_its_machine():
    given = ["-m", "benchmarks.disk", "--folder", "/mnt/disk 0", "--out=/tmp/x.json", "--pip=", "runs/a.json", "a/b"]
    expected = "python -m benchmarks.disk --folder PATH --out=PATH --pip= runs/a.json a/b"
    assert format_command(given) == expected
    assert format_command().startswith("python ") and not re.search(r"(^|[ =])/", format_command())
