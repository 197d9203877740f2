"""Find code under conditions that may write state of a model in ways that `state_writes` does not follow one by one.

Methods of submodules and of other objects, functions that get a module, and attributes that are set: what they write is
not looked for, and counts as any tensor of the module that has them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import NamedTuple, TypeGuard

from torch import nn

from featx.ir.module_effects import module_writes_state
from featx.ir.torch_layers import is_of_torch, is_torch_layer
from featx.tracing.objects.plain_objects import is_plain_value
from featx.tracing.source.assignments import assigned_values
from featx.tracing.source.calls import called_in, name_called
from featx.tracing.source.conditions import Conditions, names_variable
from featx.tracing.source.frames import Line
from featx.tracing.source.location import Function, definition_of
from featx.tracing.source.parameters import Parameters
from featx.tracing.source.reachable import function_behind, functions_reached
from featx.tracing.source_writes.state_writes import GIVING_STATE, StateWrite, may_write_state

# The attributes between a module and an object that it has, and `_ITEM` for an item of what they lead to.
_Chain = tuple[str, ...]
_ITEM = "[]"
# One that is longer is cut off.
_LONGEST_CHAIN = 4
_WRITE_STATISTICS = ("batch_norm", "instance_norm")
# Methods that a module has from torch and that write its tensors or its mode.
_WRITING = frozenset(
    "apply load_state_dict to float double half bfloat16 type cpu cuda requires_grad_ train eval zero_grad "
    "register_buffer register_parameter __setattr__ __delattr__".split()
)
# Methods that only read what objects of Python and modules hold.
_READING = GIVING_STATE | frozenset(
    "get items keys values copy index count startswith endswith split join lower upper format item tolist numpy size "
    "dim numel forward extra_repr get_extra_state get_parameter debug info warning error exception log isdisjoint "
    "issubset union intersection bit_length is_integer".split()
)
_ITERATING = frozenset("enumerate getattr iter list next reversed sorted tuple vars zip".split())
_BUILTINS = frozenset(vars(builtins)) - {"map", "filter", "setattr", "delattr"}


class _Use(NamedTuple):
    """What a place does with what a chain leads to: calls its `method`, passes it on or sets it."""

    lines: frozenset[Line]
    chain: _Chain
    method: str = ""
    is_set: bool = False


def conditional_writes(module: nn.Module, path: str, done: Collection[Line | None]) -> set[StateWrite]:
    """Return what code of `module` under conditions may write of the state.

    O(submodules), and code of a class that is new.

    Args:
        module: one whose code was traced.
        path: where it is in the traced model.
        done: the lines that do not count, since they have written something in the run.
    """
    kind = type(module)
    if is_of_torch(kind):
        return set()
    owners = {
        owner
        for use in _uses_of(kind, module.__dict__.get("forward", kind.forward))
        if use.lines.isdisjoint(done) and (owner := _owner(module, path, use)) is not None
    }
    return {StateWrite(frozenset({owner}), frozenset()) for owner in owners}


def _owner(module: nn.Module, path: str, use: _Use) -> str | None:
    """Return the path of the module whose state a use may write; None where it writes none."""
    steps = [path] if path else []
    rest = list(use.chain)
    while rest and isinstance(inner := module._modules.get(rest[0]), nn.Module):
        module = inner
        steps.append(rest.pop(0))
    owner = ".".join(steps)
    name = rest[0] if rest else ""
    if name in module._parameters or name in module._buffers:  # whose writes are followed one by one
        return f"{owner}.{name}".lstrip(".") if use.is_set else None
    if use.is_set:
        return owner
    if name in module.__dict__ and is_plain_value(module.__dict__[name]):  # which nothing can write
        return None
    if not use.method:  # it is passed on
        is_module = not rest or name == _ITEM or name in GIVING_STATE
        return owner if is_module or hasattr(type(module), name) else None
    if use.method == "__call__":  # of an item
        return owner if _may_write(module) else None
    called = None if rest else module._modules.get(use.method)
    if called is not None:
        return f"{owner}.{use.method}".lstrip(".") if _may_write(called) else None
    if use.method in _READING:
        return None
    is_own = not use.chain and use.method not in _WRITING  # its code is followed
    is_of_layer = not rest and is_torch_layer(type(module)) and use.method.startswith("__")
    return None if is_own or is_of_layer else owner


def _may_write(module: nn.Module) -> bool:
    """Say whether a call of a module may write its state or that of one inside it."""
    return any(
        module_writes_state(part) if is_torch_layer(type(part)) else may_write_state(part) for part in module.modules()
    )


@lru_cache(maxsize=1024)
def _uses_of(kind: type[nn.Module], forward: object) -> tuple[_Use, ...]:
    found: list[_Use] = []
    for code in _codes_with_module(kind, forward):
        found += code.uses()
    return tuple(dict.fromkeys(found))


class _Function:
    """A function, and the calls in its code.

    Args:
        function: the function.
        definition: its syntax.

    Attributes:
        parameters: its parameters.
    """

    def __init__(self, function: FunctionType, definition: Function) -> None:
        self.function = function
        self.definition = definition
        self.parameters = Parameters(definition)
        nodes = list(ast.walk(definition))
        calls = list(filter(_is_call, nodes))
        # Each with what it calls, or by which name, where that is not known.
        called = ((call, called_in(call, function)) for call in calls)
        self._calls = [
            (call, function_behind(value), name_called(call) if value is None else None) for call, value in called
        ]
        functions = {id(call.func) for call in calls}
        names = (each for each in nodes if isinstance(each, (ast.Name, ast.Attribute)))
        # Names that stand for something else than what is called there.
        self._values = {_name_in(each) for each in names if id(each) not in functions}

    def calls_of(self, other: FunctionType) -> list[ast.Call]:
        """Return the calls that may be of another function."""
        named = other.__name__
        return [call for call, called, name in self._calls if called is other or name == named]

    def names(self, other: FunctionType) -> bool:
        """Say whether the code names another function for anything else than a call."""
        return other.__name__ in self._values


class _Code:
    """The code of a function that may get a module, or what one has.

    Args:
        code: the function.
        own: the parameter that may be that.
        chain: where it is, from the module whose forward method runs.

    Attributes:
        assigned: the values that it assigns to variables.
    """

    def __init__(self, code: _Function, own: str, chain: _Chain) -> None:
        self._code = code
        self.own = own
        self.chain = chain
        self.assigned = assigned_values(code.definition)
        self._places = _Places(code.function.__code__.co_filename, own, self.assigned)

    def uses(self) -> Iterator[_Use]:
        """Yield what the code does with it under conditions."""
        variables = (self._code.parameters.named | self.assigned.keys()) - {self.own}
        for use in self._places.uses(_under_conditions(self._code.definition, variables)):
            yield use._replace(chain=(*self.chain, *use.chain))

    def passed_to(self, other: _Function) -> set[tuple[str, _Chain]]:
        """Return which parameters of another function may be `own` or what that has, and where that is.

        Where the function is named for anything else than a call, any may be.
        """
        found = set[tuple[str, _Chain]]()
        for call in self._code.calls_of(other.function):
            found |= self._given(call, other.parameters)
        return found | self._as_any(other.parameters) if self._code.names(other.function) else found

    def _given(self, call: ast.Call, parameters: Parameters) -> set[tuple[str, _Chain]]:
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return self._as_any(parameters)
        places = [*parameters.positional, *[""] * len(call.args)]  # more go to *args
        given = [*zip(places, call.args, strict=False), *((each.arg or "", each.value) for each in call.keywords)]
        found = {(name, (*self.chain, *chain)) for name, value in given for chain in self._places.chains_of(value)}
        is_known = all(name in parameters.named and len(chain) <= _LONGEST_CHAIN for name, chain in found)
        return found if is_known else self._as_any(parameters)

    def _as_any(self, parameters: Parameters) -> set[tuple[str, _Chain]]:
        return {(name, (*self.chain[:_LONGEST_CHAIN], _ITEM)) for name in parameters.every}


def _codes_with_module(kind: type[nn.Module], forward: object) -> list[_Code]:
    """Return the functions that a call of `forward` may run and that may get the module or a part, for each parameter.

    The first parameter of methods is the module.
    """
    methods = {id(function_behind(each)) for base in kind.__mro__ for each in vars(base).values()}
    found: list[_Code] = []
    others: list[_Function] = []
    for function, is_first in functions_reached(forward, kind):
        definition = definition_of(function)
        if definition is None:
            continue
        code = _Function(function, definition)
        if code.parameters.positional and (is_first or id(function) in methods):
            found.append(_Code(code, code.parameters.positional[0], ()))
        else:
            others.append(code)
    known = set[tuple[int, str, _Chain]]()
    for code in found:  # which grows
        for other in others:
            for own, chain in sorted(code.passed_to(other)):
                if (id(other), own, chain) not in known:
                    known.add((id(other), own, chain))
                    found.append(_Code(other, own, chain))
    return found


def _name_in(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


class _Places:
    """Finds the uses of what a module has in the code of one of its methods."""

    def __init__(self, file: str, own: str, assigned: dict[str, list[ast.expr]]) -> None:
        self._file, self._self, self._assigned = file, own, assigned

    def uses(self, nodes: Iterable[ast.AST]) -> Iterator[_Use]:
        """Yield the uses in nodes."""
        for node in nodes:
            first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
            lines = frozenset((self._file, line) for line in range(first, last + 1))
            if isinstance(node, ast.Call):
                yield from self._of_call(node, lines)
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
                for target in targets:
                    if isinstance(target, (ast.Attribute, ast.Subscript)):
                        yield from (_Use(lines, chain, is_set=True) for chain in self._chains(target) if chain)

    def chains_of(self, node: ast.AST) -> set[_Chain]:
        """Return where an expression leads from the parameter."""
        return self._chains(node)

    def _of_call(self, call: ast.Call, lines: frozenset[Line]) -> Iterator[_Use]:
        if isinstance(call.func, ast.Attribute):
            yield from (_Use(lines, chain, call.func.attr) for chain in self._chains(call.func.value))
        elif isinstance(call.func, ast.Subscript):
            yield from (_Use(lines, chain, "__call__") for chain in self._chains(call.func))
        if not (isinstance(call.func, ast.Name) and call.func.id in _BUILTINS):
            writes = (name_called(call) or "").endswith(_WRITE_STATISTICS)
            for value in (*call.args, *(keyword.value for keyword in call.keywords)):
                yield from (_Use(lines, chain, is_set=writes) for chain in self._chains(value))

    def _chains(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> set[_Chain]:
        """Return the attributes of the module along which an expression leads, up to an item of one.

        Results of other calls are taken to be new.
        """
        names: list[str] = []
        while True:
            if isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
            elif isinstance(node, (ast.Subscript, ast.Starred)):
                names = [_ITEM]
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READING:
                names = [_ITEM]
                node = node.func.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ITERATING:
                return {(*chain, _ITEM) for chain in self._of_each(node.args, seen)}
            elif isinstance(node, ast.Name) and node.id == self._self:
                return {tuple(names)}
            elif isinstance(node, ast.Name) and node.id not in seen:
                return self._of_each(self._assigned.get(node.id, ()), seen | {node.id})
            else:
                return set()

    def _of_each(self, nodes: Iterable[ast.AST], seen: frozenset[str]) -> set[_Chain]:
        return set[_Chain]().union(*(self._chains(node, seen) for node in nodes))


def _under_conditions(definition: ast.AST, variables: Collection[str]) -> Iterator[ast.AST]:
    """Yield the nodes of which a value of a variable decides whether they run."""
    for node, tests in Conditions(definition).items():
        if any(names_variable(test, variables) for test in tests):
            yield node
