"""Which names code may still use after the point where it is: a decision there may call a module again, or not."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType

from featx.tracing.source.assignments import assigned_values
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import names_in, node_at, parent_of, texts_in
from featx.tracing.source.reachable import function_behind, functions_reached

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")
# With which code gets any module, whatever it is called.
_GIVE_ANY = frozenset(
    "getattr eval exec locals globals vars _modules children modules named_children named_modules get_submodule "
    "__dict__ apply".split()
)


@dataclass
class LaterNames:
    """The names of attributes and globals that some code may still use, and texts in it.

    Attributes:
        used: those that it names, in methods that it calls too.
        of_parts: those of which it takes parts alone: attributes that it does not call (`self.block.weight`), and items
            that loops which have begun still give.
        decides: whether that code has branches, or loops over other things than attributes.
        are_known: whether there is source for all of it.
    """

    used: set[str] = field(default_factory=set)
    of_parts: set[str] = field(default_factory=set)
    decides: bool = False
    are_known: bool = True

    def may_call(self, name: str, *, is_container: bool) -> bool:
        """Say whether a module in the attribute `name` may be called, or one inside of it if that is a container."""
        if not self.are_known or name in self.used or not self.used.isdisjoint(_GIVE_ANY):
            return True
        return is_container and name in self.of_parts

    def add(self, other: LaterNames) -> None:
        """Add those that some other code may use."""
        self.used |= other.used
        self.of_parts |= other.of_parts
        self.decides = self.decides or other.decides
        self.are_known = self.are_known and other.are_known


class KnownLaterNames:
    """The names that code may use after the points where it was seen, of which each is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[CodeType, int, type], LaterNames] = {}

    def of(self, frame: FrameType, kind: type) -> LaterNames:
        """Return the names that the code of a frame may use after the point where it is.

        Args:
            frame: of code of a model.
            kind: the class of the module whose code it is.
        """
        place = frame.f_code, frame.f_lasti, kind
        if place not in self._known:
            self._known[place] = _names_after(frame, kind)
        return self._known[place]


def _names_after(frame: FrameType, kind: type) -> LaterNames:
    node = node_at(frame)
    later = None if node is None else _code_after(node, frame)
    if later is None:
        return LaterNames(decides=True, are_known=False)
    function, parts, targets = later
    assigned = assigned_values(function)
    used, taken_apart = _names_of(parts, assigned, targets)
    of_functions = _names_in_functions(used, frame, kind)
    decides = bool(of_functions) or any(_decides(each) for part in parts for each in ast.walk(part))
    iterated = {target for target in targets if any(target in _loaded(part) for part in parts)}
    values = [value for name in iterated for value in assigned.get(name, ())]
    return LaterNames(used | of_functions, taken_apart.union(*_names_of(values, assigned, set())), decides)


def _code_after(node: ast.AST, frame: FrameType) -> tuple[ast.AST, list[ast.AST], set[str]] | None:
    """Return the function around a node, its code that may run after it, and variables of loops around it."""
    parts: list[ast.AST] = []
    targets: set[str] = set()
    while True:
        parent = parent_of(node, frame)
        if parent is None or isinstance(parent, ast.Module):
            return None
        bodies = [body for name in _BODIES if isinstance(body := getattr(parent, name, None), list)]
        inside = next((body for body in bodies if node in body), None)
        if inside is None and isinstance(parent, ast.stmt):
            parts.append(parent)  # the rest of the statement, and what it decides about
        elif inside is not None:
            parts += inside[inside.index(node) + 1 :]
            if isinstance(parent, _LOOPS) and inside is parent.body:
                parts += [*inside, *parent.orelse, *([parent.test] if isinstance(parent, ast.While) else [])]
                targets |= set() if isinstance(parent, ast.While) else _loaded(parent.target)
            elif isinstance(parent, (ast.Try, ast.TryStar)):
                parts += [*parent.handlers, *parent.orelse, *parent.finalbody]
        if isinstance(parent, _SCOPES):
            return parent, parts, targets
        node = parent


def _decides(node: ast.AST) -> bool:
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        names = {id(each.value) for each in ast.walk(node.iter) if isinstance(each, ast.Attribute)}
        return any(isinstance(each, ast.Name) and id(each) not in names for each in ast.walk(node.iter))
    return isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Match, ast.Try, ast.TryStar))


def _loaded(part: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}


def _names_of(
    parts: Iterable[ast.AST], assigned: dict[str, list[ast.expr]], targets: set[str]
) -> tuple[set[str], set[str]]:
    """Return the names in code and in what is assigned to its variables, but for `targets` of loops.

    Those of which parts alone are taken come second: `block` of `self.block.weight.mean()`.
    """
    used: set[str] = set()
    of_parts: set[str] = set()
    seen = set(targets)
    pending = [(part, True) for part in parts]
    while pending:
        part, is_to_come = pending.pop()
        nodes = list(ast.walk(part))
        callees = [node.func for node in nodes if isinstance(node, ast.Call)]
        # A method that is called may call the module that has it.
        owners = {id(_owner_of(callee)) for callee in callees}
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        # What a variable has been given was called by then.
        over = set() if is_to_come else {id(callee) for callee in callees}
        for node in nodes:
            if isinstance(node, ast.Attribute) and id(node) not in over:
                is_of_parts = id(node) in inner and id(node) not in owners
                (of_parts if is_of_parts else used).add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
            elif isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                values = assigned.get(node.id)
                used |= {node.id} if values is None else set()
                pending += [(value, False) for value in values or ()]
    return used, of_parts


def _owner_of(callee: ast.expr) -> ast.expr | None:
    owner = callee.value if isinstance(callee, ast.Attribute) else None
    return owner.value if isinstance(owner, ast.Subscript) else owner


def _names_in_functions(names: set[str], frame: FrameType, kind: type) -> set[str]:
    """Return the names in methods of a class, and in functions of a file, that have one of these names."""
    found: set[str] = set()
    for name in names:
        for value in (inspect.getattr_static(kind, name, None), frame.f_globals.get(name)):
            function = function_behind(value)
            if isinstance(function, FunctionType) and not is_library_code(function.__code__):
                for reached, _ in functions_reached(function, kind):
                    found |= names_in(reached.__code__) | texts_in(reached.__code__)
    return found
