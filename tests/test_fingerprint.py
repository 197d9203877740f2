"""What tells two jobs apart: the code that a model and a transform run, wherever it stands."""

from __future__ import annotations

import collections
import decimal
import functools
import importlib.util
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from featx.fingerprint import fingerprint, fingerprint_of_modules

HELPERS = """
from torch import nn

def shifted(x):
    return x + 1

class Base(nn.Module):
    KINDS = ("a", "b")

    def act(self, x):
        return x.relu()

def unused(x):
    return x
"""
MODEL = """
import functools, logging, threading
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
import helpers
from helpers import Base

SCALE = 2.0
TABLE = torch.arange(3.0)
MEANS = np.arange(3.0)
OPTIONS = {"depth": [1, 2]}
LOGGER = logging.getLogger("a model")
LOCK = threading.Lock()

@dataclass
class Settings:
    width: int = 3

@functools.lru_cache
def table(n):
    return torch.arange(n) * SCALE

@torch.jit.script
def scripted(x):
    return x * 2

def scaled(x):
    LOGGER.warning("called")
    with LOCK:
        return helpers.shifted(x) * table(3) + TABLE + torch.from_numpy(MEANS) + OPTIONS["depth"][0] + scripted(x)

class Block(Base):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.settings = Settings()

    @property
    def factor(self):
        return 3

    @staticmethod
    def added(x):
        return x + 5

    def forward(self, x):
        return self.added(self.act(scaled(self.conv(x)))) * self.factor

def make():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())
"""
# In which file, what becomes what.
CHANGES = {
    "a number": ("model", "SCALE = 2.0", "SCALE = 3.0"),
    "a tensor": ("model", "torch.arange(3.0)", "torch.ones(3)"),
    "an array": ("model", "np.arange(3.0)", "np.ones(3)"),
    "an item of a dict": ("model", "[1, 2]", "[1, 3]"),
    "a cached function": ("model", "torch.arange(n) *", "torch.ones(n) *"),
    "a scripted function": ("model", "return x * 2", "return x * 4"),
    "a function of the file": ("model", "+ TABLE", "- TABLE"),
    "a property": ("model", "return 3", "return 4"),
    "a static method": ("model", "x + 5", "x + 6"),
    "a default of a class": ("model", "width: int = 3", "width: int = 4"),
    "a function of another file": ("helpers", "x + 1", "x + 2"),
    "a method of a base class": ("helpers", "x.relu()", "x.tanh()"),
    "a value of a base class": ("helpers", '"b"', '"c"'),
}


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> Any:
    """Return the module `model` of a folder into which these files are written."""
    folder.mkdir()
    found: Any = None
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, found)
        spec.loader.exec_module(found)
    return found


def test_the_same_code_elsewhere_has_the_same_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        fingerprint(load(tmp_path / name, monkeypatch, helpers=HELPERS, model=MODEL).make())
        for name in ("one", "other")
    )
    assert one == other


@pytest.mark.parametrize("name", CHANGES)
def test_changed_code_has_another_fingerprint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"helpers": HELPERS, "model": MODEL}
    before = fingerprint(load(tmp_path / "before", monkeypatch, **texts).make())
    file, old, new = CHANGES[name]
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new)
    assert fingerprint(load(tmp_path / "after", monkeypatch, **texts).make()) != before


def test_code_that_nothing_calls_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(load(tmp_path / "before", monkeypatch, helpers=HELPERS, model=MODEL).make())
    helpers = HELPERS.replace("return x\n", "return -x\n")
    assert helpers != HELPERS
    assert fingerprint(load(tmp_path / "after", monkeypatch, helpers=helpers, model=MODEL).make()) == before


@pytest.mark.slow
def test_it_is_the_same_in_each_process(tmp_path: Path) -> None:
    for name, text in {"helpers": HELPERS, "model": MODEL}.items():
        (tmp_path / f"{name}.py").write_text(text)
    code = "import model; from featx.fingerprint import fingerprint; print(fingerprint(model.make()))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]


def compiled(text: str, name: str = "f") -> Any:
    """A function without source."""
    space: dict[str, Any] = {"torch": torch, "functools": functools}
    exec(compile(text, "<nowhere>", "exec"), space)
    return space[name]


class Holder(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor


def decorated(factor: float) -> Any:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return torch.no_grad()(scale)


class Options:
    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


class Parent:
    """Has children in a container, which know their parent."""

    def __init__(self, kind: Any, *names: str) -> None:
        self.children = kind([Options(name=name, parent=self) for name in names])


COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
EYE = torch.eye(2)
PAIRS: dict[str, tuple[Any, Any]] = {
    "after an installed decorator": (decorated(1.0), decorated(2.0)),
    "names without source": (compiled("def f(x): return x.amax(1)"), compiled("def f(x): return x.amin(1)")),
    "a private number of a module": (Holder(1.0), Holder(2.0)),
    "a global dict with another object": (
        compiled("import threading\nG = {'lock': threading.Lock(), 'k': 1}\ndef f(x): return x * G['k']"),
        compiled("import threading\nG = {'lock': threading.Lock(), 'k': 2}\ndef f(x): return x * G['k']"),
    ),
    "a regular expression": (re.compile("a"), re.compile("b")),
    "itemgetter": (operator.itemgetter(0), operator.itemgetter(1)),
    "deque": (collections.deque([1]), collections.deque([2])),
    "Decimal": (decimal.Decimal(1), decimal.Decimal(2)),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "path": (Path("a"), Path("b")),
    "an option about warnings": (Options(mean=0, warning_threshold=1), Options(mean=0, warning_threshold=2)),
    "an array of objects": (np.array(["a", 1], dtype=object), np.array(["b", 1], dtype=object)),
    "a child in a set": (Parent(set, "a", "b"), Parent(set, "a", "c")),
    "a conjugate": (COMPLEX.conj(), COMPLEX),
    "a sparse tensor": (EYE.to_sparse(), (EYE * 2).to_sparse()),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_what_does_something_else_is_told_apart(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


def test_equal_values_have_one_fingerprint_wherever_they_lie() -> None:
    texts = [np.array(["".join(["a", str(number)]) for number in range(3)], dtype=object) for _ in range(2)]
    assert fingerprint(texts[0]) == fingerprint(texts[1])
    assert fingerprint(Parent(set, *"abcdefgh")) == fingerprint(Parent(set, *"hgfedcba"))
    assert fingerprint(COMPLEX.conj()) == fingerprint(COMPLEX.conj().resolve_conj())
    assert fingerprint(EYE.to_sparse()) == fingerprint(EYE.to_sparse())


def test_containers_that_hold_themselves() -> None:
    function = compiled("G = {'k': 1}\nG['own'] = G\ndef f(x): return G")
    assert fingerprint(function) == fingerprint(function)


def test_containers_that_hold_each_other_take_no_time() -> None:
    """Followed along each way, they would take hours."""
    text = "G = {i: {} for i in range(12)}\nfor i in G: G[i]['near'] = [G[j] for j in G if j != i]\ndef f(x): return G"
    function = compiled(text)
    assert fingerprint(function) == fingerprint(function)
    nodes = [Options(number=number) for number in range(12)]
    for node in nodes:
        node.near = set(nodes) - {node}
    assert fingerprint(nodes[0]) == fingerprint(nodes[0])


class NotesCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._last = x.shape[0]
        return x


def test_what_use_changes_does_not_count() -> None:
    module = NotesCalls()
    before = fingerprint(module)
    module(torch.rand(3))
    assert fingerprint(module) == before
    draws = np.random.default_rng()
    assert fingerprint(draws) == fingerprint(np.random.default_rng())
    assert fingerprint(torch.Generator().manual_seed(1)) == fingerprint(torch.Generator())


FACTORS = {
    "a decorator": (
        "import functools\n"
        "def scaled(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapper(*args):\n"
        "        return f(*args) * 2\n"
        "    return wrapper\n",
        "@deco.scaled\n    def forward(self, x):\n        return x",
    ),
    "a module inside a package": ("", "def forward(self, x):\n        return deco.part.scaled(x)"),
    "an implementation of a generic function": (
        "import functools\n"
        "@functools.singledispatch\n"
        "def scaled(x):\n"
        "    return x\n"
        "@scaled.register\n"
        "def _(x: int):\n"
        "    return x * 2\n",
        "def forward(self, x):\n        return deco.scaled(x)",
    ),
    "a partial method": (
        "",
        "def _scaled(self, x, by):\n        return x * by\n    forward = partialmethod(_scaled, by=2)",
    ),
}


@pytest.mark.parametrize("way", FACTORS)
def test_a_factor_counts_wherever_it_stands(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deco, forward = FACTORS[way]

    def made(factor: str, place: str) -> str:
        folder = tmp_path / place / "deco"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(deco.replace("2", factor))
        (folder / "part.py").write_text(f"def scaled(x):\n    return x * {factor}\n")
        (tmp_path / place / "model.py").write_text(
            "from functools import partialmethod\nimport deco.part\nfrom torch import nn\n"
            f"class Model(nn.Module):\n    {forward.replace('2', factor)}\n"
        )
        monkeypatch.syspath_prepend(tmp_path / place)
        for name in [name for name in sys.modules if name.split(".")[0] in ("deco", "model")]:
            monkeypatch.delitem(sys.modules, name)
        return fingerprint_of_modules(importlib.import_module("model").Model())

    first = made("2", "first")
    assert made("2", "again") == first
    assert made("3", "changed") != first
