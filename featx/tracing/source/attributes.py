"""Read which attributes the methods of a class of modules read, and how often."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, cast

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.objects.replaced_globals import global_of
from featx.tracing.source.calls import name_called
from featx.tracing.source.location import Function, definition_of, names_in, texts_in
from featx.tracing.source.reachable import functions_reached

# What Python may run several times in one call of the function around it.
_REPEATED = (
    ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
    ast.FunctionDef, ast.AsyncFunctionDef,
)  # fmt: skip

# Functions and methods that are given the name of an attribute, or the key of a dict of attributes.
_BY_NAME = frozenset("hasattr getattr delattr setattr get pop setdefault attrgetter methodcaller".split())
# Methods that change a list, dict or set.
_CHANGING = frozenset(
    "append extend insert pop remove clear reverse sort update setdefault popitem add discard appendleft".split()
    + ["__setitem__"]
)
# Those of them that return an item.
_RETURNING = frozenset({"pop", "popitem", "setdefault"})

_NO_CONSTANT = object()
# In the place of an empty dict, of which there is a new one each time.
EMPTY_DICT = object()


def is_read(kind: type, attribute: str) -> bool:
    """Say whether a method of a class of modules, or a function beside it, reads an attribute of this name.

    Without source: whether its code has the name at all.
    """
    return any(
        attribute in names_in(each.__code__) and _says(_read_in, each, attribute) for each in _functions_of(kind)
    )


def is_tested_for(kind: type, attribute: str) -> bool:
    """Say whether such a function asks for an attribute by its name as a string: `hasattr(self, "calls")`.

    Without source: whether its code has that string at all.
    """
    functions = (each for each in _functions_of(kind) if attribute in each.__code__.co_consts)
    return any(_says(_tested_in, each, attribute) for each in functions)


@lru_cache(maxsize=4096)
def assigned_by(forward: FunctionType, kind: type) -> frozenset[str] | None:
    """Return the attributes of a module that its forward may assign, or whose value it may change.

    `self.grid = x.shape`, `self.sizes["x"] = 3`, `self.context.n += 1` and `self.kept.append(x)` change grid, sizes,
    context and kept. None without source.
    """
    found: set[str] = set()
    for function, _ in functions_reached(forward, kind):
        definition = definition_of(function)
        if definition is None:
            return None
        for node in ast.walk(definition):
            found |= {_attribute_in(part) for part in _changed_parts(node)} | _changed_by_callee(node, function)
    return frozenset(found - {""})


@lru_cache(maxsize=4096)
def constants_of_init(kind: type) -> dict[str, Any]:
    """Return the attributes that `__init__` of a class, or of a base that is no torch layer, sets to a constant alone.

    An empty dict counts as one: `EMPTY_DICT`. Nothing without source.
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        init = vars(base).get("__init__")
        for node in () if is_torch_layer(base) or not inspect.isfunction(init) else _nodes_in(init):
            value = _constant_in(getattr(node, "value", None))
            for name in _assigned_in(node):
                found[name] = value if found.get(name, value) is value else _NO_CONSTANT
    return {name: value for name, value in found.items() if value is not _NO_CONSTANT}


def _constant_in(assigned: object) -> Any:
    if isinstance(assigned, ast.Constant):
        return assigned.value
    is_empty = isinstance(assigned, ast.Dict) and not assigned.keys
    return EMPTY_DICT if is_empty else _NO_CONSTANT


def _assigned_in(node: ast.AST) -> list[str]:
    """Return the attributes of `self`, or of another name, that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.attr for each in targets if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)]


def _changed_parts(node: ast.AST) -> list[ast.expr]:
    """Return the expression whose value a piece of code assigns or changes, if it does."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return [node]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        return [node.func.value]
    return []


def _takes_out(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_called(node) in _RETURNING


def _set_parts(node: ast.AST) -> list[ast.expr]:
    """Return the expression that a piece of code sets: a context variable, by `VARIABLE.set(value)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set":
        return [node.func.value]
    return []


def names_along(part: ast.AST) -> list[str]:
    """Return the names in `self.block.sizes["x"]`: self, block, sizes. The first is "" for what is no name: `f().x`."""
    attributes: list[str] = []
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        if isinstance(part, ast.Attribute):
            attributes.append(part.attr)
        part = part.value
    return [part.id if isinstance(part, ast.Name) else "", *reversed(attributes)]


def _attribute_in(part: ast.expr) -> str:
    """Return the first attribute in `module.sizes["x"]`, that of a name; "" where there is none."""
    root, *attributes = names_along(part)
    return attributes[0] if root and attributes else ""


@lru_cache(maxsize=4096)
def names_changed_in(function: FunctionType, kind: type | None) -> frozenset[str]:
    """Return the attributes and the names, of what is not its own, that a call of a function may assign or change.

    Of `self.block.cond = y` that is cond, of `self.kept[0].append(y)` kept, of `FOUND["x"] = y` FOUND. Without source:
    all names and texts in its code.
    """
    found: set[str] = set()
    for reached, _ in functions_reached(function, kind):
        if definition_of(reached) is None:
            found |= _names_and_texts(reached.__code__)
        for node in _nodes_in(reached):
            found |= {names_along(part)[-1] for part in (*_changed_parts(node), *_set_parts(node))}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                found |= {
                    each.value for each in node.args if isinstance(each, ast.Constant) and type(each.value) is str
                }
    return frozenset(found)


@lru_cache(maxsize=4096)
def names_read_in(forward: FunctionType, kind: type) -> frozenset[str]:
    """Return the attributes and names that a call of forward may read, but for those that it only changes.

    Without source: all names and texts in its code.
    """
    found: set[str] = set()
    for function, _ in functions_reached(forward, kind):
        definition = definition_of(function)
        if definition is None:
            found |= _names_and_texts(function.__code__)
            continue
        nodes = list(ast.walk(definition))
        changed = {id(part) for node in nodes if not _takes_out(node) for part in _changed_parts(node)}
        own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
        read = [node for node in nodes if id(node) not in changed]
        found |= {node.attr for node in read if isinstance(node, ast.Attribute)}
        found |= {node.id for node in read if isinstance(node, ast.Name) and node.id not in own}
        found |= _tested_in(definition)
    return frozenset(found)


def _names_and_texts(code: CodeType) -> frozenset[str]:
    return names_in(code) | texts_in(code) | frozenset(code.co_freevars)


def _changed_by_callee(node: ast.AST, caller: FunctionType) -> set[str]:
    """Return the attributes that a call hands to a function which changes what it is given: `note(self.info, size)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return set()
    callee = global_of(caller, node.func.id)
    given = [(place, _attribute_in(each)) for place, each in enumerate(node.args)]
    given += [(each.arg, _attribute_in(each.value)) for each in node.keywords]
    if not isinstance(callee, FunctionType) or not any(name for _, name in given):
        return set()
    changed = _changed_parameters(callee)
    return {name for place, name in given if name and place in changed}


@lru_cache(maxsize=4096)
def _changed_parameters(function: FunctionType) -> frozenset[int | str | None]:
    """Return the names and places of the parameters that a function changes by subscripts, attributes or methods."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    changed = {names_along(part)[0] for node in _nodes_in(function) for part in _changed_parts(node)}
    return frozenset(each for place, name in enumerate(names) if name in changed for each in (place, name))


def is_read_once(kind: type, attribute: str) -> bool:
    """Say whether `forward` calls what an attribute of this name holds once in a call, and no other method reads it.

    Without source: no.
    """
    own = [value for base in kind.__mro__ if not is_torch_layer(base) for value in vars(base).values()]
    methods = [value for value in own if inspect.isfunction(value)]
    reading = [each for each in methods if attribute in (*names_in(each.__code__), *each.__code__.co_consts)]
    reading = [each for each in reading if attribute in each.__code__.co_consts or _says(_read_in, each, attribute)]
    definition = definition_of(reading[0]) if reading == [getattr(kind, "forward", None)] else None
    return definition is not None and _count_reads(definition.body, attribute) == 1


def _count_reads(part: Any, attribute: str, *, is_called: bool = False) -> float:
    """Count the places that call what an attribute leads to.

    What is in a loop or in another function may be read many times, and what is read for something else may be called
    anywhere: `encoder = self.encoder`.
    """
    if isinstance(part, list):
        return sum(_count_reads(each, attribute) for each in cast("list[Any]", part))
    if not isinstance(part, ast.AST):
        return 0
    leads_on = isinstance(part, (ast.Attribute, ast.Subscript)) and is_called  # `self.encoder.layers[0](x)`
    called = "func" if isinstance(part, ast.Call) else "value" if leads_on else ""
    count = sum(_count_reads(value, attribute, is_called=name == called) for name, value in ast.iter_fields(part))
    if isinstance(part, ast.Attribute) and part.attr == attribute and isinstance(part.ctx, ast.Load):
        count += 1 if is_called else math.inf
    return math.inf if count and isinstance(part, _REPEATED) else count


def _functions_of(kind: type) -> list[FunctionType]:
    own = [vars(base).values() for base in kind.__mro__ if not is_torch_layer(base)]
    # A function beside the class may be given the module.
    beside: dict[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
    # A copy: other threads may add names meanwhile.
    values = (each.fget if type(each) is property else each for each in chain(*own, beside.copy().values()))
    return [value for value in values if inspect.isfunction(value)]


def _nodes_in(function: FunctionType) -> Iterator[ast.AST]:
    """Yield the syntax of a function, or nothing without source."""
    definition = definition_of(function)
    return iter(()) if definition is None else ast.walk(definition)


def _says(names_in_source: Callable[[Function], frozenset[Any]], function: FunctionType, attribute: str) -> bool:
    """Say whether an attribute is among the names that are found in the source of a function. Without source: yes."""
    definition = definition_of(function)
    return definition is None or attribute in names_in_source(definition)


@lru_cache(maxsize=4096)
def _tested_in(definition: Function) -> frozenset[Any]:
    found: list[ast.expr] = []
    for node in ast.walk(definition):
        if isinstance(node, ast.Call):
            found += node.args if name_called(node) in _BY_NAME else []
        elif isinstance(node, ast.Compare):
            found += [node.left] if isinstance(node.ops[0], (ast.In, ast.NotIn)) else []
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            is_of_dict = getattr(node.value, "attr", "") == "__dict__" or isinstance(node.value, ast.Call)
            found += [node.slice] if is_of_dict else []
    return frozenset(each.value for each in found if isinstance(each, ast.Constant))


@lru_cache(maxsize=4096)
def _read_in(definition: Function) -> frozenset[str]:
    nodes = ast.walk(definition)
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
