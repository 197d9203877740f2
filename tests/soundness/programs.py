"""Turn a program, the tree that a random model is, into a case: source and how to call it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inputs import SHAPES, SIGNATURES, Case
from vocabulary import Line
from writing import source_of

NO_PICKS = (0,) * 6


@dataclass(frozen=True)
class Statement:
    """A line with holes and what to fill them with; a block also has statements in it, and maybe an else."""

    line: Line
    picks: tuple[int, ...]
    body: tuple[Statement, ...] = ()
    otherwise: tuple[Statement, ...] = ()

    @property
    def text(self) -> str:
        """The line in forward."""
        return self.line if isinstance(self.line, str) else self.line[0]

    @property
    def setup(self) -> str:
        """The lines in `__init__`."""
        return "" if isinstance(self.line, str) else self.line[1]

    @property
    def is_block(self) -> bool:
        """Whether the line opens a block."""
        return isinstance(self.line, str) and "\n" not in self.line and self.line.endswith(":")


@dataclass(frozen=True)
class Program:
    """A model: nested classes, the statements of its forward, what it returns, how it is called."""

    statements: tuple[Statement, ...]
    nested: tuple[tuple[Statement, ...], ...] = ()
    result: Statement = Statement("$x", NO_PICKS)
    shape: int = 0
    signature: int = 0
    training: bool = False
    grad: bool = False
    taps: bool = False  # each new tensor goes through an nn.Identity, whose hook sees it
    notes: tuple[int, ...] = NO_PICKS

    @property
    def case(self) -> Case:
        """The source, and how to call it."""
        shape, signature = SHAPES[self.shape], SIGNATURES[self.signature].text
        return Case(source_of(self), shape, signature, self.training, self.grad, self.notes)

    def lines(self) -> Iterator[str]:
        """Yield the lines that the program consists of, with their holes."""
        parts = [self.statements, *self.nested]
        while parts:
            for statement in parts.pop(0):
                yield f"{statement.text} # {statement.setup}".removesuffix(" # ")
                parts += [statement.body, statement.otherwise]
