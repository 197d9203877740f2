"""Find code that may write its arguments in place, or return them, so that a trace may not have seen it do so.

What a module that is kept whole writes and returns is measured on the example. Lines of its code that write an
argument, or a view of one, and did not run there may run for another input.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

from featx.tracing.source.aliases import aliased_parts
from featx.tracing.source.calls import is_own_function, name_called, sets_inplace, values_given, written_by_call
from featx.tracing.source.frames import Line
from featx.tracing.source.location import Function, definition_of
from featx.tracing.source.parameters import Parameters
from featx.tracing.source.reachable import function_behind, functions_named, functions_reached

# Words of annotations that no tensor has: `list[int]`, `typing.Optional[str]`.
_PLAIN = frozenset("int float bool str list tuple dict set optional union none nonetype typing class sequence".split())
# A container of which it is not said what it holds.
_BARE_CONTAINER = re.compile(r"\b(list|tuple|dict|set|sequence)\b(?!\[)")
_TRIES = (ast.Try, ast.TryStar)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BRANCHES = (ast.If, ast.Match, *_LOOPS, *_TRIES)
# Methods that put what they are given into a container.
_FILLING = frozenset("append appendleft extend insert setdefault update".split())
_BINDING = ("staticmethod", "classmethod")
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


@dataclass(frozen=True)
class ArgumentUse:
    """The lines at which a function, and what it calls, may write an argument, and whether it may return one.

    Attributes:
        always: those that a call comes to in any case, also in functions that it calls in any case.
        sometimes: the others. Line 0 stands for code without source, which may write anywhere.
        is_returned: whether it, or something that it calls, may return an argument of its own, or a part of one.
    """

    always: frozenset[Line] = frozenset()
    sometimes: frozenset[Line] = frozenset()
    is_returned: bool = False

    @property
    def lines(self) -> frozenset[Line]:
        """All lines that may write an argument."""
        return self.always | self.sometimes


@dataclass(frozen=True)
class _Given:
    """Where a call gives a part of an argument, and whether it gives `*args` or `**kwargs`."""

    places: frozenset[int]
    names: frozenset[str]
    has_starred: bool


def argument_use(
    function: Callable[..., Any], kind: type | None = None, *, absent: frozenset[str] = frozenset()
) -> ArgumentUse:
    """Return what `function`, and what it calls, may do with an argument. Without source: anything.

    Its parameters in `absent` are given nothing. Followed is what `functions_reached` gives. O(code that can be
    reached); a second time O(1).
    """
    plain = function_behind(getattr(function, "__func__", function))
    if plain is None:
        return ArgumentUse()
    # Not cached for a function made inside another one, whose variables may hold a model.
    return (_read.__wrapped__ if "<locals>" in plain.__qualname__ else _read)(plain, kind, absent)


@lru_cache(maxsize=4096)
def _read(function: FunctionType, kind: type | None, absent: frozenset[str]) -> ArgumentUse:
    readers: dict[FunctionType, _Reader] = {}
    always: set[Line] = set()
    sometimes: set[Line] = set()
    is_returned = False
    for callee, _ in functions_reached(function, kind):
        definition = definition_of(callee)
        if definition is None:
            sometimes.add((callee.__code__.co_filename, 0))
            is_returned = True
        else:
            readers[callee] = _Reader(callee, definition, kind, absent if callee is function else frozenset())
    for callee, reader in list(readers.items()):
        never_given = frozenset[str]() if callee is function else _never_given(callee, readers)
        if never_given and reader.writes:
            readers[callee] = _Reader(callee, reader.definition, kind, never_given)
    certain = _called_in_any_case(function, readers)
    for callee, reader in readers.items():
        for line, is_certain in reader.writes:
            (always if is_certain and callee in certain else sometimes).add((callee.__code__.co_filename, line))
        is_returned = is_returned or reader.returns_argument
    return ArgumentUse(frozenset(always), frozenset(sometimes - always), is_returned)


def _called_in_any_case(first: FunctionType, readers: Mapping[FunctionType, _Reader]) -> set[FunctionType]:
    """Return `first` and the functions that each call of it calls, and calls under no condition anywhere."""
    under_conditions = {name for reader in readers.values() for name, is_certain in reader.calls if not is_certain}
    found, pending = {first}, [first]
    while pending:
        reader = readers.get(pending.pop())
        names = set[str]() if reader is None else {name for name, _ in reader.calls} - under_conditions
        new = [each for each in readers if each.__name__ in names and each not in found]
        found.update(new)
        pending += new
    return found


def _is_plain(annotation: object) -> bool:
    """Say whether an annotation speaks of numbers and texts alone."""
    text = str(annotation).lower()
    return {*re.findall(r"\w+", text)} <= _PLAIN and not _BARE_CONTAINER.search(text)


class _Reader:
    """Follows, statement by statement, which variables of one function may be its arguments, or parts of them.

    After a branch a variable may be what it is at the end of any way through it.

    Args:
        function: what is read.
        definition: its syntax.
        kind: the class of the module whose method it may be.
        absent: its parameters that are given nothing.

    Attributes:
        writes: the lines at which an argument is written in place, and whether the code comes to each in any case.
        calls: the names of the functions and methods that are called, and whether the code comes to that in any case.
        given: the calls by the name of what is called, each with where it is given a part of an argument.
        returns_argument: whether the code may return an argument, a part of one, or something that holds one.
    """

    def __init__(self, function: FunctionType, definition: Function, kind: type | None, absent: frozenset[str]) -> None:
        self.writes: set[tuple[int, bool]] = set()
        self.calls: set[tuple[str, bool]] = set()
        self.given: list[tuple[str, _Given]] = []
        self.definition = definition
        self.returns_argument = False
        self._function = function
        self._kind = kind
        self._is_certain = True
        self._by_option = False
        self._ever: set[str] = set()
        self._inner: list[Function] = []
        arguments = _arguments_of(definition, function.__annotations__) - absent
        self._parts = arguments | {*function.__code__.co_freevars}
        # Its variables for lists and dicts that it has made, and those into which it has put a part of an argument.
        self._containers: set[str] = set()
        self._filled: set[str] = set()
        self._read_body(definition)
        self._is_certain = False
        while self._inner:  # code inside the function finds the variables as they are when it is called
            inner = self._inner.pop()
            self._parts = self._ever | _arguments_of(inner, {})
            self._read_body(inner)

    def _read_body(self, definition: Function) -> None:
        self._ever |= self._parts
        if isinstance(definition, ast.Lambda):
            self._read_expression(definition.body)
            self.returns_argument = self.returns_argument or self._is_part(definition.body)
        else:
            self._read_all(definition.body)

    # -- statements --------------------------------------------------------------------------------------------------

    def _read_all(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._inner.append(statement)
        elif isinstance(statement, _BRANCHES):
            self._read_branches(statement)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                self._read_expression(item.context_expr)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, self._is_part(item.context_expr))
            self._read_all(statement.body)
        elif not isinstance(statement, ast.ClassDef):
            self._read_simple(statement)

    def _read_simple(self, statement: ast.stmt) -> None:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                self._read_expression(child)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                self._assign_value(target, statement.value)
        elif isinstance(statement, ast.AugAssign):
            if self._is_part(statement.target) and not self._is_own_container(statement.target):
                self._note(statement.lineno)
            elif isinstance(statement.value, _DISPLAYS) and self._is_part(statement.value):
                self._fill(statement.target)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._store(target)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            self.returns_argument = self.returns_argument or self._is_part(statement.value)
        if isinstance(statement, (ast.Return, ast.Raise)):
            self._is_certain = False

    def _read_branches(self, statement: Any) -> None:
        names = [name for name in ("test", "iter", "subject") if hasattr(statement, name)]
        asked = getattr(statement, names[0]) if names else None
        if asked is not None:
            self._read_expression(asked)
        is_loop = isinstance(statement, _LOOPS)
        before = set(self._parts)
        found = set() if isinstance(statement, ast.If) and statement.orelse else set(before)
        with self._uncertain(asked):
            for way in _ways_through(statement) * (2 if is_loop else 1):  # what one turn assigns, the next one finds
                # A handler finds what any part of the body has assigned.
                self._parts = before | found if is_loop or isinstance(statement, _TRIES) else set(before)
                if isinstance(statement, (ast.For, ast.AsyncFor)):
                    self._assign(statement.target, self._is_part(statement.iter))
                elif isinstance(statement, ast.Match) and self._is_part(statement.subject):
                    self._parts |= {name for case in statement.cases for name in _captures(case.pattern)}
                self._read_all(way)
                found |= self._parts
        self._parts = found
        if any(isinstance(node, (ast.Return, ast.Raise)) for node in ast.walk(statement)):
            self._is_certain = False

    def _assign_value(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and _makes_container(value):
            self._containers.add(target.id)
        targets: list[ast.expr] = getattr(target, "elts", [])
        values: list[ast.expr] = getattr(value, "elts", [])
        if targets and len(targets) == len(values) and not _has_starred((*targets, *values)):
            are_parts = [self._is_part(each) for each in values]  # all of them, before the first assignment
            for each, is_part in zip(targets, are_parts, strict=True):
                self._assign(each, is_part)
        else:
            self._assign(target, self._is_part(value))

    def _assign(self, target: ast.expr, is_part: bool) -> None:
        if isinstance(target, ast.Name):
            (self._parts.add if is_part else self._parts.discard)(target.id)
            self._ever |= self._parts
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._assign(each, is_part)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, is_part)
        else:
            self._store(target)
            if is_part and isinstance(target, ast.Subscript) and _name_of(target) in self._containers:
                self._fill(target)

    def _store(self, target: ast.expr) -> None:
        is_item = isinstance(target, ast.Subscript)
        if is_item and self._is_part(target.value) and not self._is_own_container(target.value):
            self._note(target.lineno)

    def _is_own_container(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._filled and node.id not in self._parts

    def _fill(self, container: ast.expr) -> None:
        """Note that a container, or what it is a part of, holds a part of an argument from here on."""
        name = _name_of(container)
        if name is not None:
            self._filled.add(name)

    # -- expressions -------------------------------------------------------------------------------------------------

    def _read_expression(self, node: ast.AST) -> None:
        """Note the writes inside an expression, and what it assigns."""
        if isinstance(node, ast.Lambda):
            self._inner.append(node)
        elif isinstance(node, _COMPREHENSIONS):
            parts = set(self._parts)
            with self._uncertain():
                self._bind_targets(node)
                self._read_children(node)
            self._parts = parts
        elif isinstance(node, ast.IfExp):
            self._read_expression(node.test)
            with self._uncertain(node.test):
                self._read_expression(node.body)
                self._read_expression(node.orelse)
        elif isinstance(node, ast.BoolOp):
            with self._uncertain():
                self._read_children(node)
        else:
            self._read_children(node)
            if isinstance(node, ast.Call):
                self._read_call(node)
            elif isinstance(node, ast.NamedExpr):
                self._assign(node.target, self._is_part(node.value))

    def _read_children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._read_expression(child)

    def _bind_targets(self, comprehension: Any) -> None:
        for each in comprehension.generators:
            self._assign(each.target, self._is_part(each.iter))

    def _read_call(self, call: ast.Call) -> None:
        self.calls.add((name_called(call) or "", self._is_certain))
        self.given.append((name_called(call) or "", self._given_by(call)))
        is_inplace = any(sets_inplace(each) and not _names_option(each.value) for each in call.keywords)
        written = [*written_by_call(call, self._function), *(call.args if is_inplace else ())]
        if any(map(self._is_part, written)):
            # A method that stands in another line than what it is called on is called in its own line.
            self._note(call.func.end_lineno or 0 if isinstance(call.func, ast.Attribute) else call.lineno)
        match call.func:
            case ast.Attribute(value=container, attr=name) if name in _FILLING:
                if any(map(self._is_part, values_given(call))):
                    self._fill(container)
            case _:
                pass

    def _given_by(self, call: ast.Call) -> _Given:
        return _Given(
            frozenset(place for place, value in enumerate(call.args) if self._is_part(value)),
            frozenset(each.arg for each in call.keywords if each.arg is not None and self._is_part(each.value)),
            _has_starred(call.args) or any(each.arg is None for each in call.keywords),
        )

    def _note(self, line: int) -> None:
        # `if self.inplace:`, `relu(x, inplace=inplace)`: an option of the module, and no condition.
        if not self._by_option:
            self.writes.add((line, self._is_certain))

    @contextlib.contextmanager
    def _uncertain(self, test: ast.expr | None = None) -> Generator[None]:
        """Read what runs under a condition."""
        is_certain, by_option = self._is_certain, self._by_option
        self._is_certain, self._by_option = False, by_option or (test is not None and _names_option(test))
        yield
        self._is_certain, self._by_option = is_certain, by_option

    def _is_part(self, node: ast.AST) -> bool:
        """Say whether the value of an expression may be an argument, a part of one, or hold one."""
        if isinstance(node, ast.Name):
            return node.id in self._parts or node.id in self._filled
        if isinstance(node, _COMPREHENSIONS):
            return self._holds_part(node)
        if isinstance(node, ast.Call) and self._calls_own_method(node):
            return any(map(self._is_part, values_given(node)))
        return any(map(self._is_part, aliased_parts(node, self._function)))

    def _holds_part(self, comprehension: Any) -> bool:
        parts, ever = set(self._parts), set(self._ever)
        self._bind_targets(comprehension)
        found = any(map(self._is_part, aliased_parts(comprehension, self._function)))
        self._parts, self._ever = parts, ever
        return found

    def _calls_own_method(self, call: ast.Call) -> bool:
        function = call.func
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return False
        is_own = function.value.id in ("self", "cls")
        return is_own and any(map(is_own_function, functions_named(function.attr, self._function, self._kind)))


def _name_of(node: ast.expr) -> str | None:
    """Return the variable of which `outs`, `outs["x"]` and `outs.items` are parts; None for the module itself."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) and node.id not in ("self", "cls") else None


def _makes_container(value: ast.expr) -> bool:
    """Say whether an expression makes a list or dict: `[a, b]`, `list[int]()`, `collections.deque()`."""
    called = value.func if isinstance(value, ast.Call) else None
    called = called.value if isinstance(called, ast.Subscript) else called
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return isinstance(value, _DISPLAYS) or name in ("dict", "list", "OrderedDict", "defaultdict", "deque")


def _names_option(node: ast.AST) -> bool:
    """Say whether an expression is the option `inplace`, or the opposite of it, and nothing else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node = node.operand
    return "inplace" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def _has_starred(nodes: Iterable[ast.expr]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _ways_through(statement: Any) -> list[list[ast.stmt]]:
    """Return the parts of a statement of which some run, in their order."""
    if isinstance(statement, ast.Match):
        return [case.body for case in statement.cases]
    ways = [statement.body, *(handler.body for handler in getattr(statement, "handlers", ()))]
    return [*ways, *(getattr(statement, name) for name in ("orelse", "finalbody") if getattr(statement, name, None))]


def _captures(pattern: ast.pattern) -> set[str]:
    names = [getattr(each, "name", None) or getattr(each, "rest", None) for each in ast.walk(pattern)]
    return {name for name in names if name}


def _arguments_of(definition: Function, annotations: Mapping[str, Any]) -> set[str]:
    """Return the names of those arguments that may be tensors."""
    plain = {name for name, annotation in annotations.items() if _is_plain(annotation)}
    return Parameters(definition).every - plain - {"self", "cls"}


def _never_given(callee: FunctionType, readers: Mapping[FunctionType, _Reader]) -> frozenset[str]:
    """Return parameters with an int as default for which no call gives a part of an argument.

    An empty set where something else than a call names the function, or calls it by another name, or decorates it.
    """
    decorators = getattr(readers[callee].definition, "decorator_list", [])
    name, parameters = callee.__name__, Parameters(readers[callee].definition)
    calls = [call for reader in readers.values() for called, call in reader.given if called == name]
    mentions = sum(_mentions(reader.definition, name) for reader in readers.values())
    is_decorated = any(not isinstance(each, ast.Name) or each.id not in _BINDING for each in decorators)
    if not calls or len(calls) != mentions or is_decorated or any(call.has_starred for call in calls):
        return frozenset()
    # A method may be called with or without its first parameter.
    places = {place + shift for call in calls for place in call.places for shift in (0, 1)}
    given = {each for place, each in enumerate(parameters.positional) if place in places}
    given.update(*(call.names for call in calls))
    defaults = parameters.defaults.items()
    of_ints = {each for each, value in defaults if isinstance(value, ast.Constant) and isinstance(value.value, int)}
    return frozenset(of_ints - given)


def _mentions(definition: Function, name: str) -> int:
    """Return how often code names a function or method."""
    nodes = list(ast.walk(definition))
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return len(named) + len([node for node in nodes if isinstance(node, ast.Attribute) and node.attr == name])
