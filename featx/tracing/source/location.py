"""Find the syntax of code that runs: the node of Python's `ast` at which a frame is, and that of a function.

Source that is not the one from which the code was compiled says nothing: the file may have been edited since. So the
source is compiled again, and must give code that is equal.
"""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from operator import or_
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# What has code of its own and no name, and the name that Python gives that code.
_UNNAMED = {
    ast.Lambda: "<lambda>",
    ast.GeneratorExp: "<genexpr>",
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
}
# What `from __future__ import ...` at the head of a file changes in how the rest of it is compiled.
_FUTURE = reduce(or_, [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names])


# Functions of Python that read local variables by their names.
BY_NAME = frozenset({"locals", "vars", "eval", "exec"})
# Python 3.11 raises SystemError where two threads parse at the same time.
_ATTEMPTS = 5


class Position(NamedTuple):
    """Where an expression or a statement stands, as `ast` and code objects give it: lines from 1, columns in bytes."""

    line: int | None
    end_line: int | None
    column: int | None
    end_column: int | None


class Source:
    """One statement at the top level of a file, and the code objects that are compiled from it. O(nodes) to make."""

    def __init__(self, tree: ast.Module, code: CodeType) -> None:
        self.codes = set(codes_in(code))
        self.parents: dict[ast.AST, ast.AST] = {}
        self._at: dict[tuple[int, int, int, int], ast.AST] = {}
        self._ending_at: dict[tuple[int, int], ast.Attribute | ast.Call] = {}
        self._with_code: list[Function | Comprehension] = []
        self._found: dict[CodeType, Function | Comprehension | None] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, (ast.expr, ast.stmt, ast.pattern, ast.alias)):
                # Of nodes at one place, a statement `f(x)` and its call, the inner one comes later and stays.
                end = node.end_lineno or 0, node.end_col_offset or 0
                self._at[node.lineno, end[0], node.col_offset, end[1]] = node
                if isinstance(node, (ast.Attribute, ast.Call)):
                    self._ending_at[end] = node
            if isinstance(node, (*_FUNCTIONS, *_UNNAMED)):
                self._with_code.append(node)

    def node_at(self, position: Position) -> ast.AST | None:
        """Return the innermost node that stands exactly there.

        Of a call of a method that goes over lines Python gives the line of the method's name as the first one.
        """
        found = self._at.get(position)  # pyright: ignore[reportArgumentType]
        if found is not None or position.line is None:
            return found
        longer = self._ending_at.get((position.end_line, position.end_column))  # pyright: ignore[reportArgumentType]
        return longer if longer is not None and longer.lineno < position.line else None

    def function_of(self, code: CodeType) -> Function | None:
        """Return the definition that gives this code; None for a comprehension."""
        found = self.syntax_of(code)
        return found if isinstance(found, _FUNCTIONS) else None

    def syntax_of(self, code: CodeType) -> Function | Comprehension | None:
        """Return the definition or the comprehension that gives this code."""
        if code not in self._found:
            self._found[code] = self._syntax_of(code)
        return self._found[code]

    def _syntax_of(self, code: CodeType) -> Function | Comprehension | None:
        found = [each for each in self._with_code if _first_line(each) == code.co_firstlineno]
        found = [each for each in found if _name_of_code(each) == code.co_name]
        if len(found) > 1:  # in one line: that around all of the code, and of several the inner one, which comes last
            places = [place for place in map(Position._make, code.co_positions()) if None not in place]
            spanned = [sum(_spans(each, place) for place in places) for each in found]
            found = [each for each, count in zip(found, spanned, strict=True) if count == max(spanned)]
        return found[-1] if found else None


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is no Python, or too deep. Other threads may parse too."""
    for _ in range(_ATTEMPTS):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        except SystemError:
            continue
    return None


def source_of(code: CodeType, namespace: Mapping[str, Any] | None = None) -> Source | None:
    """Return the source of `code`, or None where there is none, or where it is not what the code was compiled from.

    The file is read through `linecache`, which knows the cells of notebooks too. The first question about a statement
    at top level costs about as much as importing it; later ones nothing.

    Args:
        code: of a function, or of code inside one.
        namespace: the globals of the code, through which source is found that is in no file, but in an archive.
    """
    if namespace is not None:
        linecache.lazycache(code.co_filename, dict(namespace) if type(namespace) is not dict else namespace)
    return _source_of(code)


def node_at(frame: FrameType, offset: int | None = None) -> ast.AST | None:
    """Return the syntax of what `frame` does now, or at `offset` of its code; None where no source says so."""
    source = source_of(frame.f_code, frame.f_globals)
    offset = frame.f_lasti if offset is None else offset
    return None if source is None else source.node_at(position_of(frame.f_code, offset))


def parent_of(node: ast.AST, frame: FrameType) -> ast.AST | None:
    """Return the node around one that `node_at(frame)` gave, or around a parent of it."""
    source = source_of(frame.f_code, frame.f_globals)
    return None if source is None else source.parents.get(node)


def definition_of(function: FunctionType) -> Function | None:
    """Return the syntax of a function, or None where no source says so."""
    return definition_in(function.__code__, function.__globals__)


def syntax_in(code: CodeType) -> Function | Comprehension | None:
    """Return the syntax of the function or the comprehension that has this code, or None where no source says so."""
    source = source_of(code)
    return None if source is None else source.syntax_of(code)


def definition_in(code: CodeType, namespace: Mapping[str, Any] | None = None) -> Function | None:
    """Return the syntax of the function that has this code, or None where no source says so; see `source_of`."""
    source = source_of(code, namespace)
    return None if source is None else source.function_of(code)


def loads_of_local(target: ast.expr, frame: FrameType) -> list[tuple[ast.AST, ast.AST]] | None:
    """Return the places that read a local variable of `frame`, each with the node around it.

    None where there may be others: `target` is no local variable, the code calls `locals()` or the like, or there is no
    source.
    """
    code = frame.f_code
    source = source_of(code, frame.f_globals)
    definition = None if source is None else source.function_of(code)
    if source is None or definition is None or not isinstance(target, ast.Name):
        return None
    if not BY_NAME.isdisjoint(code.co_names):
        return None
    if target.id not in code.co_varnames and target.id not in code.co_cellvars:
        return None
    return loads_in(definition, source, target)


def loads_in(definition: Function, source: Source, target: ast.expr) -> list[tuple[ast.AST, ast.AST]]:
    """Return the places that read a variable in a definition, each with the node around it; none if it is no name."""
    names = (node for node in ast.walk(definition) if isinstance(node, ast.Name))
    wanted = target.id if isinstance(target, ast.Name) else None
    return [(node, source.parents[node]) for node in names if node.id == wanted and isinstance(node.ctx, ast.Load)]


def position_of(code: CodeType, offset: int) -> Position:
    """Return where the instruction at `offset` of `code` stands in its source."""
    places = _places(code)
    return places[offset // 2] if 0 <= offset // 2 < len(places) else Position(None, None, None, None)


@lru_cache(maxsize=4096)
def _places(code: CodeType) -> list[Position]:
    return [Position(*place) for place in code.co_positions()]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and all code that is defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that `code`, or code that is defined inside it, uses."""
    return frozenset(name for each in codes_in(code) for name in each.co_names)


def texts_in(code: CodeType) -> frozenset[str]:
    """Return the texts that `code`, or code that is defined inside it, has as constants."""
    return frozenset(each for part in codes_in(code) for each in part.co_consts if isinstance(each, str))


@lru_cache(maxsize=4096)
def _source_of(code: CodeType) -> Source | None:
    # The statement at top level around the code comes first: parsing a file of 5,000 lines takes 0.1 s.
    lines = linecache.getlines(code.co_filename)
    for start, end in (_top_level(lines, code.co_firstlineno), (0, len(lines))):
        source = _parsed("\n" * start + "".join(lines[start:end]), code.co_flags & _FUTURE)
        if source is not None and code in source.codes:
            return source
    return None


@lru_cache(maxsize=4096)
def _parsed(text: str, flags: int) -> Source | None:
    tree = parse(text)
    try:
        return None if tree is None else Source(tree, compile(text, "<source>", "exec", flags, dont_inherit=True))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _top_level(lines: list[str], line: int) -> tuple[int, int]:
    start = min(line - 1, len(lines))
    while start > 0 and not (start < len(lines) and _starts_statement(lines[start])):
        start -= 1
    while start > 0 and lines[start - 1].startswith("@"):
        start -= 1
    end = start + 1
    is_decorator = start < len(lines) and lines[start].startswith("@")
    while end < len(lines) and (is_decorator or not _starts_statement(lines[end])):
        is_decorator = is_decorator and not lines[end].startswith(("def ", "class ", "async "))
        end += 1
    return start, end


def _starts_statement(line: str) -> bool:
    return not line[:1].isspace() and line[:1] not in ("", "#", ")", "]", "}") and not line.startswith(("else", "elif"))


def _first_line(node: Function | Comprehension) -> int:
    decorators = getattr(node, "decorator_list", ())
    return decorators[0].lineno if decorators else node.lineno


def _name_of_code(node: Function | Comprehension) -> str:
    return node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else _UNNAMED[type(node)]


def _spans(node: ast.expr | ast.stmt, place: Position) -> bool:
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return start <= (place.line, place.column) and (place.end_line, place.end_column) <= end
