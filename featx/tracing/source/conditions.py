"""Which conditions decide whether a piece of code runs."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_LEAVING = (ast.Return, ast.Break, ast.Continue)

Tests = tuple[ast.expr, ...]


class Conditions:
    """The conditions of each node of a function: of branches around it, and of those that may leave code before it.

    Of `if x.sum() > 0: return x`, the condition decides whether what follows runs. One that raises does not count.

    Args:
        definition: the function. O(nodes).
    """

    def __init__(self, definition: ast.AST) -> None:
        self._tests: dict[ast.AST, Tests] = {}
        self._read(definition, ())

    def of(self, node: ast.AST) -> Tests:
        """Return the conditions of a node of the function."""
        return self._tests[node]

    def items(self) -> Iterator[tuple[ast.AST, Tests]]:
        """Yield each node of the function, with its conditions."""
        yield from self._tests.items()

    def _read(self, node: ast.AST, tests: Tests) -> None:
        self._tests[node] = tests
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            self._read(node.test, tests)
            self._read_all((node.body, node.orelse), (*tests, node.test))
        elif isinstance(node, ast.Match):
            self._read(node.subject, tests)
            self._read_all((node.cases,), (*tests, node.subject))
        elif isinstance(node, ast.BoolOp):
            for place, value in enumerate(node.values):
                self._read(value, (*tests, *node.values[:place]))
        elif isinstance(node, _COMPREHENSIONS):
            inside = tuple(test for each in node.generators for test in each.ifs)
            self._read_all((value for _, value in ast.iter_fields(node)), (*tests, *inside))
        else:
            self._read_all((value for _, value in ast.iter_fields(node)), tests)

    def _read_all(self, values: Iterable[object], tests: Tests) -> None:
        """Read the values of fields: nodes, lists of nodes, and what is neither."""
        for value in values:
            if isinstance(value, ast.AST):
                self._read(value, tests)
            elif isinstance(value, list):
                leaving: Tests = ()
                for each in value:
                    if isinstance(each, ast.AST):
                        self._read(each, (*tests, *leaving))
                        leaving += _tests_that_may_leave(each)


def _tests_that_may_leave(statement: ast.AST) -> Tests:
    """Return the conditions in a statement that decide whether what follows it runs."""
    if not isinstance(statement, ast.stmt):
        return ()
    leaving = _leaving_in(statement)
    branches = (each for each in ast.walk(statement) if isinstance(each, (ast.If, ast.While)))
    return tuple(each.test for each in branches if any(id(inner) in leaving for inner in ast.walk(each)))


def _leaving_in(node: ast.AST, *, is_in_loop: bool = False) -> set[int]:
    """Return the ids of the statements inside one that leave it: not those that leave a loop in it, or go on there."""
    if isinstance(node, _LEAVING):
        return set() if is_in_loop and not isinstance(node, ast.Return) else {id(node)}
    is_loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
    inside = node.body if is_loop else []  # `else` of a loop is not in it
    found = (_leaving_in(each, is_in_loop=is_in_loop or each in inside) for each in ast.iter_child_nodes(node))
    return set[int]().union(*found)


def names_variable(test: ast.expr, variables: Collection[str]) -> bool:
    """Say whether a condition asks for the value of a variable, and not whether it is None or of which class."""
    nodes = (node for part in asked_values(test) for node in ast.walk(part))
    return any(isinstance(node, ast.Name) and node.id in variables for node in nodes)


def asked_values(test: ast.expr) -> list[ast.expr]:
    """Return the parts of a condition that ask for a value, and not whether something is None or of which class."""
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in asked_values(value)]
    if isinstance(test, ast.UnaryOp):
        return asked_values(test.operand)
    is_of_identity = isinstance(test, ast.Compare) and any(isinstance(each, (ast.Is, ast.IsNot)) for each in test.ops)
    called = test.func if isinstance(test, ast.Call) else None
    is_of_class = isinstance(called, ast.Name) and called.id in ("isinstance", "hasattr")
    return [] if is_of_identity or is_of_class else [test]
