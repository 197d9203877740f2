"""Find code that writes its arguments in place under a condition, so that a trace may not have seen it do so.

What a module that is kept whole writes is measured on the example. Lines of its code that write an argument, or a view
of one, and did not come to pass there may do so for another input.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from featx.tracing.source.frames import BINARY_OPERATORS, is_library_code

Line = tuple[CodeType, int]
_STORES_ITEM = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
_ENDS = ("RETURN_", "RAISE_", "RERAISE")
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_SLICE")
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
# Methods and attributes that give, or may give, a view of the tensor that they belong to, or an item.
_VIEWS = frozenset(
    "view view_as reshape reshape_as transpose permute movedim swapaxes swapdims t flatten unflatten squeeze unsqueeze "
    "expand expand_as narrow select diagonal unfold chunk split tensor_split unbind contiguous detach to type_as float "
    "double half bfloat16 data T mT H mH real imag as_strided ravel values items get".split()
)
# Words of annotations that no tensor has: `list[int]`, `typing.Optional[str]`.
_PLAIN = frozenset("int float bool str list tuple dict set optional union none nonetype typing class sequence".split())
# A container of which it is not said what it holds.
_BARE_CONTAINER = re.compile(r"\b(list|tuple|dict|set|sequence)\b(?!\[)")


@dataclass(frozen=True)
class WritingLines:
    """The lines at which a function, and what it calls, may write an argument.

    Args:
        always: those that the function comes to in any case.
        sometimes: the others.
    """

    always: frozenset[Line] = frozenset()
    sometimes: frozenset[Line] = frozenset()


def writing_lines(function: Callable[..., Any], kind: type | None = None) -> WritingLines:
    """Return the lines at which `function` may write an argument in place, and those of what it calls.

    Followed are methods of `kind`, by name, and functions in the globals of the code, but none of torch or Python.
    O(code that can be reached).
    """
    always: set[Line] = set()
    sometimes: set[Line] = set()
    for callee, code, is_first in _code_reached(function, kind):
        if _has_writes(code):
            for line, is_certain in _Reader(code, callee).writes():
                (always if is_certain and is_first else sometimes).add((code, line))
    return WritingLines(frozenset(always), frozenset(sometimes))


def may_return_argument(function: Callable[..., Any], kind: type | None = None) -> bool:
    """Say whether `function`, or something that it calls, may return an argument of its own, or a part of one.

    O(code that can be reached).
    """
    return any(_Reader(code, callee).returns_argument() for callee, code, _ in _code_reached(function, kind))


def _code_reached(function: Callable[..., Any], kind: type | None) -> Iterator[tuple[Any, CodeType, bool]]:
    """Yield each code that a call may run, with the function that it is in, and whether that is `function` itself."""
    first = inspect.unwrap(getattr(function, "__func__", function))
    seen: set[CodeType] = set()
    pending = [first]
    while pending:
        callee = pending.pop()
        code: CodeType | None = getattr(callee, "__code__", None)
        if code is None or code in seen or is_library_code(code):
            continue
        codes = [code, *_codes_in(code)]
        seen.update(codes)
        pending += _callees(codes, callee, kind)
        yield from ((callee, each, callee is first) for each in codes)


def _callees(codes: list[CodeType], function: Any, kind: type | None) -> Iterator[Any]:
    for name in {name for code in codes for name in code.co_names}:
        for found in (function.__globals__.get(name), inspect.getattr_static(kind, name, None) if kind else None):
            method = getattr(found, "__func__", found)  # of static and class methods
            if isinstance(method, FunctionType):
                yield inspect.unwrap(method)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _has_writes(code: CodeType) -> bool:
    # Ahead of looking closer, which takes a hundred times as long.
    if any(map(_is_inplace_name, code.co_names)) or any(map(_names_keyword, code.co_consts)):
        return True
    operations = zip(code.co_code[::2], code.co_code[1::2], strict=True)
    return any(_stores_in_place(dis.opname[opcode], argument) for opcode, argument in operations)


def _is_inplace_name(name: Any) -> bool:
    is_name = isinstance(name, str) and name.endswith("_") and not name.startswith("_")
    return is_name and (hasattr(torch.Tensor, name) or hasattr(torch, name))


def _names_keyword(value: Any) -> bool:
    return isinstance(value, tuple) and ("inplace" in value or "out" in value)


def _stores_in_place(name: str, argument: int) -> bool:
    if name == "BINARY_OP":
        return bool(BINARY_OPERATORS[argument].endswith("="))
    return name in _STORES_ITEM


def _is_plain(annotation: object) -> bool:
    """Say whether an annotation speaks of numbers and texts alone."""
    text = str(annotation).lower()
    return {*re.findall(r"\w+", text)} <= _PLAIN and not _BARE_CONTAINER.search(text)


@dataclass(frozen=True)
class _Step:
    """An instruction of Python: where it is in the source, and the offset that it may jump to, or -1."""

    name: str
    value: Any
    argument: int
    offset: int
    target: int
    line: int
    column: int

    @property
    def loaded(self) -> tuple[str, ...]:
        """The variables that it loads."""
        if self.name == "STORE_FAST_LOAD_FAST":
            return self.value[1:]
        if not self.name.startswith(("LOAD_FAST", "LOAD_DEREF")):
            return ()
        return (self.value,) if isinstance(self.value, str) else self.value

    @property
    def stored(self) -> tuple[str, ...]:
        """The variables that it assigns."""
        if self.name == "STORE_FAST_LOAD_FAST":  # two at once, in Python 3.13
            return self.value[:1]
        if not self.name.startswith("STORE_FAST"):
            return ()
        return (self.value,) if isinstance(self.value, str) else self.value

    @property
    def writes(self) -> bool:
        """Whether it writes something in place, or belongs to a call that does."""
        if self.name in _LOADS_ATTRIBUTE:
            return _is_inplace_name(self.value)
        if self.name in ("LOAD_CONST", "KW_NAMES"):
            return _names_keyword(self.value)
        return _stores_in_place(self.name, self.argument)


def _steps_of(code: CodeType) -> Iterator[_Step]:
    for each in dis.get_instructions(code):
        positions: Any = each.positions
        line, column = positions.lineno or 0, positions.col_offset or 0
        if each.opname not in ("CACHE", "EXTENDED_ARG"):
            target = each.argval if each.opcode in _JUMPS else -1
            value = code.co_consts[each.arg] if each.opname == "KW_NAMES" and each.arg is not None else each.argval
            yield _Step(each.opname, value, each.arg or 0, each.offset, target, line, column)


class _Reader:
    """Reads which of its arguments one function writes, and whether it returns one.

    Args:
        code: that of the function, or of one inside it.
        function: the function.
    """

    def __init__(self, code: CodeType, function: Any) -> None:
        annotations: dict[str, Any] = function.__annotations__ if code is function.__code__ else {}
        self._globals: dict[str, Any] = function.__globals__
        self._steps = list(_steps_of(code))
        self._lines: dict[int, list[_Step]] = {}
        for step in self._steps:
            self._lines.setdefault(step.line, []).append(step)
        self._arguments = self._with_parts(_arguments_of(code, annotations))

    def writes(self) -> Iterator[tuple[int, bool]]:
        """Yield each line at which an argument is written in place, and whether the code comes to it in any case."""
        certain_until = next((step.offset for step in self._steps if step.name.startswith(_ENDS)), sys.maxsize)
        for step in self._steps:
            if step.writes and any(not self._is_fresh(name, step) for name in self._written_by(step) & self._arguments):
                jumps_over = [each for each in self._steps if each.offset < step.offset < each.target]
                if not any(map(self._asks_for_option, [step, *jumps_over])):
                    yield step.line, step.offset < certain_until and not jumps_over

    def _asks_for_option(self, step: _Step) -> bool:
        # `if self.inplace:`, `relu(x, inplace=inplace)`: an option of the module, and no condition.
        return any(each.value == "inplace" for each in self._lines[step.line])

    def returns_argument(self) -> bool:
        """Say whether the code may return an argument, a part of one, or something that holds one."""
        for position, step in enumerate(self._steps):
            if step.name == "RETURN_VALUE" and position:
                names = self._parts_stored(position - 1) | self._held_by(self._steps[position - 1])
                if any(not self._is_fresh(name, step) for name in names & self._arguments):
                    return True
        return False

    def _held_by(self, given: _Step) -> set[str]:
        # A tuple, list or dict that is written out, or an object of a class: any variable of the line.
        line = [each for each in self._lines[given.line] if each.offset < given.offset]
        called = {self._globals.get(each.value) for each in line if each.name == "LOAD_GLOBAL"}
        is_made = given.name.startswith("CALL") and any(isinstance(each, type) for each in called)
        if is_made or given.name.startswith("BUILD_"):
            return {name for each in line for name in each.loaded}
        return set()

    def _written_by(self, step: _Step) -> set[str]:
        # x in `x[0].add_(1)`, none in `x.new_empty(3).fill_(1)`, any variable of the line in `torch.relu_(x)`.
        line = self._lines[step.line]
        first = self._first_of(step)
        if _stores_in_place(step.name, step.argument):
            return first
        if not _names_keyword(step.value):
            chain = [each for each in line if each.column == step.column and each.offset < step.offset]
            if any(each.name in _LOADS_ATTRIBUTE and each.value not in _VIEWS for each in chain):
                return set()
            if first:
                return first
        return {name for each in line for name in each.loaded}

    def _is_fresh(self, name: str, step: _Step) -> bool:
        # `x = x.clone()` further up, with no way past it, and nothing else that is assigned to x from there on.
        stores = [at for at, each in enumerate(self._steps) if name in each.stored]
        parts = [at for at in stores if not self._arguments.isdisjoint(self._parts_stored(at))]
        jumps = [(each.offset, each.target) for each in self._steps if each.target >= 0]
        for at in stores:
            start = self._steps[at].offset
            is_passed_by = any(origin < start < target <= step.offset for origin, target in jumps)
            is_loop = any(target <= step.offset < origin for origin, target in jumps)
            later = [part for part in parts if is_loop or start < self._steps[part].offset < step.offset]
            if start < step.offset and at not in parts and not is_passed_by and not later:
                return True
        return False

    def _first_of(self, step: _Step) -> set[str]:
        # The variable that an expression starts with.
        # Python 3.13 loads two variables at once, at the place of the first.
        return {each.loaded[0] for each in self._lines[step.line] if each.column == step.column and each.loaded}

    def _with_parts(self, names: set[str]) -> set[str]:
        """Return `names` and those of the variables that are parts of them, or the same."""
        stored = [(step.stored, self._parts_stored(at)) for at, step in enumerate(self._steps) if step.stored]
        while True:
            found = names.union(*(variables for variables, parts in stored if not names.isdisjoint(parts)))
            if found == names:
                return names
            names = found

    def _parts_stored(self, position: int) -> set[str]:
        """Return the variables of which the one that is assigned at `position` may be a part, or the same."""
        while position and self._steps[position].name.startswith(("STORE_FAST", "UNPACK_", "SWAP")):
            position -= 1
        given = self._steps[position]
        before = [each for each in self._lines[given.line] if each.offset < given.offset]
        if given.name == "FOR_ITER":
            return {name for each in before for name in each.loaded}
        is_part = given.name.startswith("LOAD_FAST") or given.name in _SUBSCRIPTS
        is_part = is_part or _stores_in_place(given.name, given.argument)  # `x += 1`
        if given.name == "LOAD_ATTR":
            is_part = given.value in _VIEWS
        elif given.name.startswith("CALL"):
            is_part = any(each.name in _LOADS_ATTRIBUTE and each.value in _VIEWS for each in before)
        return self._first_of(given) if is_part else set()


def _arguments_of(code: CodeType, annotations: dict[str, Any]) -> set[str]:
    """Return the names of those arguments that may be tensors, and of what code takes from the function around it."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    plain = {name for name, annotation in annotations.items() if _is_plain(annotation)}
    return ({*code.co_varnames[:count]} | {*code.co_freevars}) - plain - {"self", "cls"}
