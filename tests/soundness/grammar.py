"""Turn choices into a random program, and a program into smaller ones.

pytest puts this folder on the path of imports, and `benchmarks/soundness.py` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import decisions
import vocabulary as words
from inputs import SHAPES, SIGNATURES
from programs import NO_PICKS, Program, Statement

# `choose(limit)` gives an int from 0 to limit - 1; smaller is simpler.
Choose = Callable[[int], int]


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
        taps=choose(4) == 3,
        notes=_picks(choose),
    )


def of_each_line() -> Iterator[Program]:
    """Yield for each line a program of it alone, after a product and, where it opens a block, around a write."""
    for shape in (0, 4):
        kinds = [words.PLAIN, words.MODULES, words.MODULES_OF_RANK[len(SHAPES[shape])], words.WRITES, words.VIEWS]
        kinds += [words.STATE, words.RANDOM, decisions.SIZES, decisions.USES_OF_SIZES, decisions.CALLS]
        kinds += [decisions.VALUES]
        kinds += [
            tuple(f"if {test}:" for test in (*decisions.CONDITIONS, *decisions.VALUE_CONDITIONS)),
            decisions.LOOPS,
        ]
        for line in [line for kind in kinds for line in kind]:
            statement = Statement(line, NO_PICKS)
            if statement.is_block:
                statement = replace(statement, body=(Statement("$x += 1", NO_PICKS),))
            product = Statement("$M = $x * 2", NO_PICKS)
            nested = ((Statement("$M = $x + 1", NO_PICKS),),)
            yield Program((product, statement), nested, Statement("$everything", NO_PICKS), shape)


def _statements(choose: Choose, rank: int, wild: bool, limit: int, depth: int = 0) -> tuple[Statement, ...]:
    found: list[Statement] = []
    while len(found) < limit and choose(8) != 0:
        found.append(_statement(choose, rank, wild, depth))
    return tuple(found)


def _statement(choose: Choose, rank: int, wild: bool, depth: int) -> Statement:
    kinds: list[tuple[words.Line, ...]] = [
        words.PLAIN, words.MODULES_OF_RANK[rank], words.MODULES, words.WRITES, words.WRITES, words.VIEWS, words.VIEWS,
        decisions.SIZES, decisions.SIZES, decisions.USES_OF_SIZES, decisions.USES_OF_SIZES, words.PLAIN,
        decisions.CALLS,
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
        {"signature": 0}, {"grad": False}, {"taps": False}, {"training": False}, {"result": Statement("$x", NO_PICKS)},
        {"result": Statement("$everything", NO_PICKS)} if program.result.line != "$x" else {},
        {"shape": 0} if len(SHAPES[program.shape]) == 2 else {}, {"notes": NO_PICKS},
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
