"""Turn a program into the Python source of its classes.

Lines read variables by number, counted back from the latest and modulo what there is, so that a program without one of
its lines is a program too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from inputs import SIGNATURES
from vocabulary import DEFINITIONS

if TYPE_CHECKING:
    from programs import Program, Statement

# Which of the six picks of a statement fills a hole.
_PICKS = {"x": 0, "y": 1, "t": 2, "l": 2, "i": 3, "f": 3, "j": 4, "a": 4, "n": 5, "b": 5, "B": 5, "g": 5}
_HOLE = re.compile(r"\$(everything|[A-Za-z])")
_NEW = {"M": "x", "T": "t", "I": "i", "J": "i", "F": "f", "L": "l"}
_IMPORTS = {
    "collections": "import collections",
    "copy": "import copy",
    "functools": "import functools",
    "itertools": "import itertools",
    "math": "import math",
    "operator": "import operator",
    "random": "import random",
    "types": "import types",
    "np": "import numpy as np",
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
}


def source_of(program: Program) -> str:
    """Write the classes of a program, and above them what they name."""
    classes = []
    for place, statements in enumerate(program.nested):
        writer = _Writer(place)
        writer.block(statements)
        classes.append(writer.finish(f"Block{place}", "x", (), "x" if place % 2 == 0 else "x, None", plain=True))
    signature = SIGNATURES[program.signature]
    writer = _Writer(len(program.nested), program.taps)
    writer.scope["x"] += signature.tensors
    writer.scope["i"] += signature.numbers
    writer.block(program.statements)
    classes.append(writer.finish("Model", signature.text, signature.prologue, writer.fill(program.result)))
    text_of_classes = "\n\n\n".join(classes)
    parts = [
        *(text for name, text in DEFINITIONS.items() if re.search(rf"\b{name}\b", text_of_classes)),
        text_of_classes,
    ]
    imports = [text for name, text in _IMPORTS.items() if re.search(rf"\b{name}\.", "\n".join(parts))]
    return "\n\n\n".join(["\n".join(imports), *parts]) + "\n"


class _Writer:
    """Fills the holes of the statements of one class and keeps its variables and attributes."""

    def __init__(self, blocks: int, taps: bool = False) -> None:
        self.blocks, self.taps = blocks, taps
        self.scope: dict[str, list[str]] = {"x": ["x"], "t": [], "i": [], "f": [], "l": []}
        self.attributes: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.created: list[str] = []  # tensors that the last line bound
        self.count = 0

    def block(self, statements: tuple[Statement, ...], indent: str = "        ") -> None:
        """Write statements; variables that they bind are known to those after them."""
        for statement in statements:
            if re.search(r"\$[bB]", statement.text + statement.setup) and not self.blocks:
                continue
            outer = {kind: list(names) for kind, names in self.scope.items()}
            self.lines += [indent + line for line in self.fill(statement).split("\n")]
            for name in self.created if self.taps else ():
                tap = self._attribute("self.$a = nn.Identity()", 0)
                self.lines.append(f"{indent}{name} = self.{tap}({name})")
            if statement.is_block:
                inner = {kind: list(names) for kind, names in self.scope.items()}
                self._body(statement.body, indent)
                if statement.otherwise:
                    self.scope = inner
                    self.lines.append(f"{indent}else:")
                    self._body(statement.otherwise, indent)
                self.scope = outer

    def _body(self, statements: tuple[Statement, ...], indent: str) -> None:
        length = len(self.lines)
        self.block(statements, indent + "    ")
        if len(self.lines) == length:
            self.lines.append(f"{indent}    pass")

    def fill(self, statement: Statement) -> str:
        """The text of a statement; what its capitals name is in scope from now on."""
        names: dict[str, str] = {}
        created: list[tuple[str, str]] = []

        def name(match: re.Match[str]) -> str:
            hole = match[1]
            if hole not in names:
                if hole in _NEW or hole in "uvw":
                    self.count += 1
                    names[hole] = f"{_NEW.get(hole, hole)}{self.count}"
                    if hole in _NEW:
                        created.append((_NEW[hole], names[hole]))
                elif hole == "a":
                    block = f"Block{statement.picks[_PICKS['B']] % max(1, self.blocks)}"
                    setup = statement.setup.replace("$B", block).replace("$C", "4")
                    names["a"] = self._attribute(setup, statement.picks[_PICKS["a"]])
                elif hole == "b":
                    place = statement.picks[_PICKS["b"]] % self.blocks
                    names["b"] = self._attribute(f"self.$a = Block{place}()", statement.picks[_PICKS["a"]])
                elif hole == "C":
                    names["C"] = "4"
                else:
                    names[hole] = self._read(hole, statement.picks)
            return names[hole]

        text = _HOLE.sub(name, statement.text)
        for kind, variable in created:
            self.scope[kind].append(variable)
        self.created = [variable for kind, variable in created if kind in "xt"]
        return text

    def _read(self, hole: str, picks: tuple[int, ...]) -> str:
        pick = picks[_PICKS.get(hole, 0)]
        scope = self.scope
        if hole == "everything":
            return ", ".join([*scope["x"], *scope["t"], *scope["i"], *scope["f"], *scope["l"]]) + ","
        if hole == "n":
            return str(pick)
        if hole == "g":
            return "" if (pick % max(1, self.blocks)) % 2 == 0 else "[0]"
        candidates = {
            "x": scope["x"], "y": scope["x"], "t": scope["x"][:1] + scope["t"], "i": scope["i"], "j": scope["i"],
            "f": scope["i"] + scope["f"], "l": scope["l"],
        }[hole]  # fmt: skip
        if candidates:
            return candidates[-1 - pick % len(candidates)]
        subject = scope["x"][-1 - picks[0] % len(scope["x"])]
        return {
            "i": f"{subject}.shape[0]",
            "j": f"{subject}.shape[1]",
            "f": f"math.sqrt({subject}.shape[1])",
            "l": f"[{subject}]",
        }[hole]

    def _attribute(self, setup: str, pick: int) -> str:
        if pick % 2:
            for known, attribute in self.attributes:
                if known == setup:
                    return attribute
        kind = re.search(r"= (?:nn\.)?(?:\w+\.)*\(?(?:nn\.)?(Block|[A-Z]\w*)", setup)
        stem = kind[1].lower() if kind and kind[1] not in ("Parameter", "None") else "state"
        attribute = f"{stem}{len(self.attributes)}"
        self.attributes.append((setup, attribute))
        return attribute

    def finish(self, name: str, parameters: str, prologue: tuple[str, ...], result: str, plain: bool = False) -> str:
        """The text of the class."""
        setups = [
            f"        {line}"
            for setup, attribute in self.attributes
            for line in setup.replace("$a", attribute).split("\n")
        ]
        if plain:
            result = self.scope["x"][-1] + result[1:]
        return "\n".join(
            [
                f"class {name}(nn.Module):",
                *(["    def __init__(self):", "        super().__init__()", *setups, ""] if setups else []),
                f"    def forward(self, {parameters}):",
                *(f"        {line}" for line in prologue),
                *self.lines,
                f"        return {result}",
                *(
                    ["", "    def relu_of(self, x):", "        return x.relu()"]
                    if "self.relu_of(" in "\n".join(self.lines)
                    else []
                ),
            ]
        )
