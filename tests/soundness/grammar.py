"""Turn choices into a random program, and a program into the source of an nn.Module with inputs for it.

Lines of a program read variables by number, counted back from the latest and modulo what there is, so that a program
without one of its lines is a program too. pytest puts this folder on the path of imports, and `benchmarks/soundness.py`
does the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import decisions
import vocabulary as words
from inputs import SHAPES, SIGNATURES, Case

# `choose(limit)` gives an int from 0 to limit - 1; smaller is simpler.
Choose = Callable[[int], int]

_PICKS = {"x": 0, "y": 1, "t": 2, "l": 2, "i": 3, "f": 3, "j": 4, "a": 4, "n": 5, "b": 5, "B": 5, "g": 5}
_HOLE = re.compile(r"\$(everything|[A-Za-z])")
_NEW = {"M": "x", "T": "t", "I": "i", "J": "i", "F": "f", "L": "l"}
_IMPORTS = {
    "collections": "import collections",
    "copy": "import copy",
    "functools": "import functools",
    "math": "import math",
    "operator": "import operator",
    "random": "import random",
    "np": "import numpy as np",
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
}


@dataclass(frozen=True)
class Statement:
    """A line with holes and what to fill them with; a block also has statements in it, and maybe an else."""

    line: words.Line
    picks: tuple[int, ...]
    body: tuple[Statement, ...] = ()
    otherwise: tuple[Statement, ...] = ()

    @property
    def is_block(self) -> bool:
        """Whether the line opens a block."""
        return isinstance(self.line, str) and "\n" not in self.line and self.line.endswith(":")


@dataclass(frozen=True)
class Program:
    """A model: nested classes, the statements of its forward, what it returns, how it is called."""

    statements: tuple[Statement, ...]
    nested: tuple[tuple[Statement, ...], ...] = ()
    result: Statement = Statement("$x", (0,) * 6)
    shape: int = 0
    signature: int = 0
    training: bool = False
    grad: bool = False
    notes: tuple[int, ...] = field(default=(0,) * 6)

    @property
    def case(self) -> Case:
        """The source, and how to call it."""
        return Case(
            _source(self), SHAPES[self.shape], SIGNATURES[self.signature].text, self.training, self.grad, self.notes
        )

    def lines(self) -> Iterator[str]:
        """Yield the lines that the program consists of, with their holes."""
        parts = [self.statements, *self.nested]
        while parts:
            for statement in parts.pop(0):
                yield f"{_text(statement)} # {_text(statement, 1)}".removesuffix(" # ")
                parts += [statement.body, statement.otherwise]


def draw(choose: Choose) -> Program:
    """Choose a program; with all choices 0 it is `return x`."""
    shape = choose(len(SHAPES))
    rank = len(SHAPES[shape])
    wild = choose(4) == 3
    nested = tuple(_statements(choose, rank, wild, 4) for _ in range(choose(3)))
    return Program(
        statements=_statements(choose, rank, wild, 12),
        nested=nested,
        result=Statement(words.RESULTS[choose(len(words.RESULTS)) * choose(2)], _picks(choose)),
        shape=shape,
        signature=choose(len(SIGNATURES)) if choose(3) == 2 else 0,
        training=choose(2) == 1,
        grad=choose(2) == 1,
        notes=_picks(choose),
    )


def _statements(choose: Choose, rank: int, wild: bool, limit: int, depth: int = 0) -> tuple[Statement, ...]:
    found: list[Statement] = []
    while len(found) < limit and choose(8) != 0:
        found.append(_statement(choose, rank, wild, depth))
    return tuple(found)


def _statement(choose: Choose, rank: int, wild: bool, depth: int) -> Statement:
    kinds: list[tuple[words.Line, ...]] = [
        words.PLAIN, words.MODULES_OF_RANK[rank], words.MODULES, words.WRITES, words.WRITES, words.VIEWS, words.VIEWS,
        decisions.SIZES, decisions.SIZES, decisions.USES_OF_SIZES, decisions.USES_OF_SIZES, words.PLAIN,
    ]  # fmt: skip
    if depth < 2:
        kinds += [decisions.CONDITIONS, decisions.CONDITIONS, decisions.LOOPS]
    # A line that nothing can follow refuses the whole program: such lines go into one program of four.
    if wild:
        kinds += [decisions.VALUES, words.STATE, words.STATE, words.RANDOM, decisions.VALUE_CONDITIONS]
    elif choose(12) == 11:
        kinds = [words.STATE, words.RANDOM]
    kind = kinds[choose(len(kinds))]
    line = kind[choose(len(kind))]
    picks = _picks(choose)
    if kind is decisions.CONDITIONS or kind is decisions.VALUE_CONDITIONS:
        body = _statements(choose, rank, wild, 3, depth + 1)
        return Statement(f"if {line}:", picks, body, _statements(choose, rank, wild, 2, 2) if choose(2) else ())
    if kind is decisions.LOOPS:
        return Statement(line, picks, _statements(choose, rank, wild, 3, depth + 1))
    return Statement(line, picks)


def _picks(choose: Choose) -> tuple[int, ...]:
    return tuple(choose(4) for _ in range(6))


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs that are simpler by one step: without a line, a block as its body, with simpler inputs."""
    for statements in _smaller(program.statements):
        yield replace(program, statements=statements)
    for place, statements in enumerate(program.nested):
        for other in _smaller(statements):
            yield replace(program, nested=(*program.nested[:place], other, *program.nested[place + 1 :]))
    if program.nested:
        yield replace(program, nested=program.nested[:-1])
    for change in (
        {"signature": 0}, {"grad": False}, {"training": False}, {"result": Statement("$x", (0,) * 6)},
        {"result": Statement("$everything", (0,) * 6)} if program.result.line != "$x" else {},
        {"shape": 0} if len(SHAPES[program.shape]) == 2 else {}, {"notes": (0,) * 6},
    ):  # fmt: skip
        other = replace(program, **change)
        if other != program:
            yield other


def _smaller(statements: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    for place, statement in enumerate(statements):
        before, after = statements[:place], statements[place + 1 :]
        yield (*before, *after)
        if statement.is_block:
            yield (*before, *statement.body, *after)
            for body in _smaller(statement.body):
                yield (*before, replace(statement, body=body), *after)
            for body in _smaller(statement.otherwise):
                yield (*before, replace(statement, otherwise=body), *after)
        for index, pick in enumerate(statement.picks):
            if pick:
                picks = (*statement.picks[:index], 0, *statement.picks[index + 1 :])
                yield (*before, replace(statement, picks=picks), *after)


# -- programs as text --------------------------------------------------------------------------------------------------


def _source(program: Program) -> str:
    rank = len(SHAPES[program.shape])
    classes = []
    for place, statements in enumerate(program.nested):
        writer = _Writer(rank, place)
        writer.block(statements)
        classes.append(writer.finish(f"Block{place}", "x", (), "x" if place % 2 == 0 else "x, None", plain=True))
    signature = SIGNATURES[program.signature]
    writer = _Writer(rank, len(program.nested))
    writer.scope["x"] += signature.tensors
    writer.scope["i"] += signature.numbers
    writer.block(program.statements)
    classes.append(writer.finish("Model", signature.text, signature.prologue, writer.fill(program.result)))
    text_of_classes = "\n\n\n".join(classes)
    parts = [
        *(text for name, text in words.DEFINITIONS.items() if re.search(rf"\b{name}\b", text_of_classes)),
        text_of_classes,
    ]
    imports = [text for name, text in _IMPORTS.items() if re.search(rf"\b{name}\.", "\n".join(parts))]
    return "\n\n\n".join(["\n".join(imports), *parts]) + "\n"


class _Writer:
    """Fills the holes of the statements of one class and keeps its variables and attributes."""

    def __init__(self, rank: int, blocks: int) -> None:
        self.rank, self.blocks = rank, blocks
        self.scope: dict[str, list[str]] = {"x": ["x"], "t": [], "i": [], "f": [], "l": []}
        self.attributes: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.count = 0

    def block(self, statements: tuple[Statement, ...], indent: str = "        ") -> None:
        """Write statements; variables that they bind are known to those behind them."""
        for statement in statements:
            if re.search(r"\$[bB]", _text(statement) + _text(statement, 1)) and not self.blocks:
                continue
            outer = {kind: list(names) for kind, names in self.scope.items()}
            self.lines += [indent + line for line in self.fill(statement).split("\n")]
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
                    setup = _text(statement, 1).replace("$B", block).replace("$C", "4")
                    names["a"] = self._attribute(setup, statement.picks[_PICKS["a"]])
                elif hole == "b":
                    place = statement.picks[_PICKS["b"]] % self.blocks
                    names["b"] = self._attribute(f"self.$a = Block{place}()", statement.picks[_PICKS["a"]])
                elif hole == "C":
                    names["C"] = "4"
                else:
                    names[hole] = self._read(hole, statement.picks)
            return names[hole]

        text = _HOLE.sub(name, _text(statement))
        for kind, variable in created:
            self.scope[kind].append(variable)
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


def _text(statement: Statement, part: int = 0) -> str:
    line = statement.line
    if isinstance(line, str):
        return line if part == 0 else ""
    return line[part]
