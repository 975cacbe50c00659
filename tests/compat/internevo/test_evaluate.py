"""An InternEvo configuration is evaluated by its syntax tree: what Python would say of it, and nothing is run."""

from __future__ import annotations

import math
import time

import pytest

from npuzero.compat.internevo import evaluate
from npuzero.errors import ConfigError


@pytest.fixture
def say(tmp_path):
    """What a file of this text says."""

    def values(text, name="config.py"):
        (tmp_path / name).write_text(text)
        return dict(evaluate(tmp_path / name).values)

    return values


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\nb = -a + 2.5\nc = not a\nd = 2**16\ne = 7 // 2\nf = 7 % 4\ng = 8 / 3",
        "a = 512 * 1024 * 1024\nb = 1e-4\nc = None\nd = True\ne = 'x' + \"y\" 'z'\nf = '=' * 3",
        "a = dict(x=1, y=dict(z=(1, 2)))\nb = a['y']['z'][0]\nc = {'k': [1, *a['y']['z']], **a}\nd = [1, 2, 3][-1]",
        "a = dict(x=1)\nb = dict(a, y=2)\nc = dict(**a, z=3)\nd = dict([('p', 1)])\ne = a | b",
        "n = 'job'\na = f'{n}_{3:04d}_{1 / 3:.3f}_{n!r:>8}'\nb = f'{{}}'",
        "a = 3\nb = 'big' if a > 2 else 'small'\nc = 1 < a <= 3 and 'x' in ('x', 'y')",
        "a = 3\nd = a == 3 or 1 / 0\ne = a is not None\nf = a not in (1, 2)",
        "a = int(50 / 2)\nb = float('inf')\nc = str(3)\nd = max(1, 5, 3)\ne = min(2, 1)",
        "a = len([1, 2])\nb = list((1, 2))\nc = abs(-2)\nd = bool('')\ne = tuple([1])",
        "a = b = [1]\na += [2]\nc = (1,)\nc += (2,)\nd = 5\nd -= 2\nd *= 3\ne, (f, g) = 1, (2, 3)",
        "a = dict(x=dict())\na['x']['y'] = 1\na['l'] = [0, 0]\na['l'][1] = 2",
        "x: int = 3\nif x > 2:\n    y = 1\nelif 1 / 0:\n    y = 2\nelse:\n    y = 3\n'''a text'''\npass",
        "import os\nfrom math import pi\nimport a.b.c as d\nx = 1",
        "a = 'abcdef'[1:-1:2]\nb = [1, 2, 3][:2]\nc = ()\nd = {}\ne = []",
    ],
)
def test_it_says_what_python_would(say, text):
    expected = {}
    exec("\n".join(line for line in text.splitlines() if "import" not in line), {}, expected)
    expected.pop("__annotations__", None)
    assert say(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\ny = __import__('os').system('true')", 2, "Attribute|call"),
        ("x = open('/etc/passwd')", 1, "a call"),
        ("import os\n\nx = os.environ['HOME']", 3, "os, of `import os`|Attribute"),
        ("from os import environ\nx = environ", 2, "environ, of `from os import environ`"),
        ("from math import *", 1, "ImportFrom"),
        ("x = [i for i in (1, 2)]", 1, "ListComp"),
        ("x = lambda: 1", 1, "Lambda"),
        ("def f():\n    return 1", 1, "FunctionDef"),
        ("class A:\n    pass", 1, "ClassDef"),
        ("for i in (1, 2):\n    x = i", 1, "For"),
        ("while True:\n    pass", 1, "While"),
        ("x = 'a'.join(('b',))", 1, "a call"),
        ("x = dict.fromkeys((1,))", 1, "a call"),
        ("dict(x=1)", 1, "Expr"),
        ("x = (y := 1)", 1, "NamedExpr"),
        ("try:\n    x = 1\nfinally:\n    y = 1", 1, "Try"),
        ("x = 1\ndel x", 2, "Delete"),
        ("x = b'bytes'", 1, "bytes"),
        ("x = 1j", 1, "complex"),
        ("x = (-1) ** 0.5", 1, "complex"),
        ("x = {1, 2}", 1, "Set"),
        ("x = ...", 1, "ellipsis"),
        ("x = '%s' % 1", 1, "%"),
        ("x = ~1", 1, "UnaryOp"),
        ("x = 1 << 3", 1, "BinOp"),
        ("x = y", 1, "'y'"),
        ("x = dict(lr=1)['rl']", 1, "'rl'"),
        ("x = 1 / 0", 1, "ZeroDivisionError"),
        ("x = [1][3]", 1, "IndexError"),
        ("x = 1 + 'a'", 1, "TypeError"),
        ("x = int('abc')", 1, "ValueError"),
        ("x = {[]: 1}", 1, "TypeError"),
        ("x = 10.0 ** 400", 1, "OverflowError"),
        ("a, b = 1, 2, 3", 1, "3"),
        ("with open('x') as f:\n    pass", 1, "With"),
        ("with read_base():\n    x = 1", 2, "Assign"),
        ("with read_base():\n    from nowhere.at_all import *", 2, "no such file"),
        ("x = 1\ny = (", 2, "SyntaxError"),
        ("x = 1\0", 1, "null byte|SyntaxError"),
        ("len = 3\nx = len([])", 2, "a call"),
        ("x.y = 1", 1, "Attribute"),
        ("x = dict(**{1: 2})", 1, "names"),
        ("x = [1]\nx[0:1] = [2]", 2, "Subscript"),
    ],
)
def test_whatever_would_have_to_be_run_is_refused_with_its_line(say, tmp_path, text, line, words):
    with pytest.raises(ConfigError, match=words) as caught:
        say(text)
    assert str(caught.value).startswith(f"{tmp_path / 'config.py'}:{line}: ")
    assert caught.value.do


BOMBS = {
    "power": "x = 10**10**10",
    "powers": "x = 2**1000\ny = x**1000",
    "product": "x = 2**1000\n" + "x = x * x\n" * 100,
    "text": "x = 'a' * 10**9",
    "texts": "x = 'a' * 10000\n" + "x = x + x\n" * 60,
    "list": "x = [0] * 10**9",
    "lists": "x = [0] * 10000\n" + "x += x\n" * 60,
    "laughs": "a = ['lol'] * 100\n" + "".join(f"{'abcdefgh'[i + 1]} = [{'abcdefgh'[i]}] * 100\n" for i in range(7)),
    "shared text": "t = 'a' * 10000\nx = [t] * 10000\ny = str(x)",
    "width": "x = f'{1:1000000000}'",
    "precision": "x = f'{1.5:.1000000000f}'",
    "made width": "w = '9' * 9\nx = f'{1:{w}}'",
    "cycle": "x = dict()\nx['x'] = x\ny = str(x)",
    "deep": "x = " + "(" * 90 + "1" + ",)" * 90 + "\n" + "x = [x]\n" * 200,
    "deep expression": "x = " + "-" * 5000 + "1",
    "long sum": "x = " + "+".join(["1"] * 20000),
    "parentheses": "x = " + "(" * 100000 + ")" * 100000,
    "digits": "x = " + "9" * 100000,
    "work": "x = [0] * 10000\n" + "y = x + [1]\n" * 1000,
    "large file": "x = 1\n" + "# comment\n" * 200_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_grow_is_refused_before_it_does(say, name):
    begin = time.process_time()
    with pytest.raises(ConfigError):
        say(BOMBS[name])
    assert time.process_time() - begin < 10


def test_a_file_of_bases_that_take_each_other_ends(say, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.py").write_text("with read_base():\n    from configs.b import *\n")
    (tmp_path / "configs" / "b.py").write_text("with read_base():\n    from configs.a import *\n")
    with pytest.raises(ConfigError, match="at most 16 files"):
        say("with read_base():\n    from configs.a import *\n")


def test_bases_are_found_around_the_file_and_read_likewise(say, tmp_path, monkeypatch):
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    (tmp_path / "one" / "bases").mkdir()
    (tmp_path / "one" / "bases" / "sizes.py").write_text("WIDTH = 4\n_hidden = 1\nmodel = dict(width=WIDTH)\n")
    text = "with read_base():\n    from bases.sizes import *\nmodel['depth'] = WIDTH * 2\n"
    assert say(text, "one/two/config.py") == {"WIDTH": 4, "model": {"width": 4, "depth": 8}}
    assert say("with read_base():\n    from bases.sizes import WIDTH as w\n", "one/two/config.py") == {"w": 4}
    assert say("with read_base():\n    from ..bases.sizes import model\n", "one/two/config.py") == {
        "model": {"width": 4}
    }
    with pytest.raises(ConfigError, match="'WIDTH'"):
        say("with read_base():\n    from bases.sizes import WIDTHS\n", "one/two/config.py")
    monkeypatch.chdir(tmp_path / "one")
    (tmp_path / "elsewhere.py").write_text("with read_base():\n    from bases.sizes import WIDTH\n")
    assert dict(evaluate(tmp_path / "elsewhere.py").values) == {"WIDTH": 4}


def test_nothing_of_the_file_runs(say, tmp_path):
    for text in (
        "open(WHERE, 'w')",
        "x = open(WHERE, 'w')",
        "import os\nx = os.mkdir(WHERE)",
        "x = f'{open(WHERE, \"w\")}'",
    ):
        with pytest.raises(ConfigError):
            say(f"WHERE = {str(tmp_path / 'made')!r}\n{text}")
    assert not (tmp_path / "made").exists()


def test_a_missing_file_is_said():
    with pytest.raises(ConfigError, match="a file to read"):
        evaluate("no/such/config.py")


def test_names_that_are_read_are_known_and_inf_is_a_number(say, tmp_path):
    assert say("x = float('inf')\ny = x")["y"] == math.inf
    assert evaluate(tmp_path / "config.py").read == {"x"}
