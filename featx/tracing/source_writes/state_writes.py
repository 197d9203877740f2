"""Find code of a module that may write the module's parameters and buffers, and that did not run in a trace.

Whether that code runs was decided by checks of the graph. They have to be kept wherever the written tensor is read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.ir.paths import module_at
from featx.ir.torch_layers import is_of_torch, is_torch_layer
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.source.aliases import aliased_parts
from featx.tracing.source.assignments import assigned_values
from featx.tracing.source.attributes import names_along
from featx.tracing.source.calls import called_in, is_own_function, name_called, values_given, written_by_call
from featx.tracing.source.conditions import Conditions, asked_values, names_variable
from featx.tracing.source.frames import Line
from featx.tracing.source.location import Function, definition_of
from featx.tracing.source.parameters import Parameters
from featx.tracing.source.reachable import function_behind, functions_reached
from featx.tracing.source_writes.argument_use import ArgumentUse, argument_use

# The attributes between a module and what it reads of itself: `self.proj.weight` is ("proj", "weight"), and
# `self.proj.parameters()` is ("proj", "parameters", "()").
_Chain = tuple[str, ...]
_CALL = "()"
# Methods of modules that give their tensors.
GIVING_STATE = frozenset(
    "parameters named_parameters buffers named_buffers modules named_modules children named_children state_dict "
    "get_parameter get_buffer get_submodule".split()
)


class _Write(NamedTuple):
    """A place that may write what `chains` lead to, if the module is in the mode `training` (None: in both).

    Where `called` leads to a submodule, that may write them, as its code says; else the place is no write.
    `is_decided` says whether values of variables may decide that it runs; so may those that `asked` lead to.
    """

    lines: frozenset[Line]
    chains: frozenset[_Chain]
    reads: frozenset[_Chain]
    training: bool | None
    is_decided: bool
    asked: frozenset[_Chain]
    called: _Chain = ()


class StateWrite(NamedTuple):
    """The paths of tensors, and of modules, that a statement may write, and of those from which it may compute that."""

    written: frozenset[str]
    read: frozenset[str]


def possible_state_writes(
    module: nn.Module, path: str, written_at: Collection[Line | None], *, for_other_inputs: bool
) -> set[StateWrite]:
    """Return what code of `module` may write of its parameters and buffers that did not run.

    O(submodules), and code of a class that is new.

    Args:
        module: one whose code was traced.
        path: where it is in the traced model.
        written_at: the lines of its code that wrote something in place.
        for_other_inputs: count those under conditions too: there they may not run, or run in another call or turn.
    """
    found: set[StateWrite] = set()
    for write in _writes_of(type(module), module.__dict__.get("forward", type(module).forward)):
        is_of_mode = write.training is None or write.training is module.training
        lines, is_decided = write.lines, write.is_decided
        if write.called:
            use = _use_by_submodule(module, write.called)
            lines, is_decided = use.lines, is_decided or bool(use.sometimes)
        is_decided = is_decided or any(_may_change(module, chain) for chain in write.asked)
        if is_of_mode and lines and ((for_other_inputs and is_decided) or lines.isdisjoint(written_at)):
            places = (_resolved(module, path, chains) for chains in (write.chains, write.reads))
            found.add(StateWrite(*map(frozenset, places)))
    return found


def may_write_state(module: nn.Module) -> bool:
    """Say whether code of a module itself may write its parameters and buffers."""
    kind = type(module)
    return bool(_writes_of(kind, module.__dict__.get("forward", kind.forward)))


def _use_by_submodule(module: nn.Module, called: _Chain) -> ArgumentUse:
    """Return what the submodule that `called` leads to may do with what it is given."""
    inner = module_at(module, ".".join(called))
    if inner is None or is_torch_layer(type(inner)):
        return ArgumentUse()
    if isinstance(inner, torch.jit.ScriptModule):
        return ArgumentUse(sometimes=frozenset({("", 0)}))  # anywhere
    return argument_use(forward_of(inner), type(inner))


def _may_change(module: nn.Module, chain: _Chain) -> bool:
    """Say whether what a chain leads to is a tensor, or what a method returns: another one in another call."""
    for place, name in enumerate(chain):
        if isinstance(inner := module._modules.get(name), nn.Module):
            module = inner
            continue
        value = module.__dict__.get(name)
        is_tensor = name in module._parameters or name in module._buffers or isinstance(value, torch.Tensor)
        return is_tensor or _CALL in chain[place:]
    return False


def _resolved(module: nn.Module, path: str, chains: Iterable[_Chain]) -> Iterator[str]:
    """Yield where chains lead from a module: to a tensor, or to a module of which they may be any tensor."""
    for chain in chains:
        steps = [path] if path else []
        owner = module
        for name in chain:
            if name in owner._modules and isinstance(inner := owner._modules[name], nn.Module):
                steps.append(name)
                owner = inner
                continue
            if name in owner._parameters or name in owner._buffers:
                yield ".".join([*steps, name])
            elif name in GIVING_STATE:
                yield ".".join(steps)
            break  # what a submodule or another method returns, and plain attributes, are taken to be no state
        else:
            yield ".".join(steps)


@lru_cache(maxsize=1024)
def _writes_of(kind: type[nn.Module], forward: Callable[..., Any]) -> tuple[_Write, ...]:
    if is_of_torch(kind) or issubclass(kind, torch.jit.ScriptModule):
        return ()
    methods = [
        _Method(function, definition)
        for function, _ in functions_reached(forward, kind)
        if (definition := definition_of(function)) is not None and _is_method(function, kind, forward)
    ]
    given = _arguments_given(methods)
    for _ in methods:  # as deep as calls can be nested
        for method in methods:
            method.take_conditions_of_calls(methods)
    return tuple(write for method in methods for write in method.writes(given))


def _is_method(function: FunctionType, kind: type, forward: Callable[..., Any]) -> bool:
    found = function_behind(inspect.getattr_static(kind, function.__name__, None))
    return function in (found, inspect.unwrap(getattr(forward, "__func__", forward)))


def _arguments_given(methods: list[_Method]) -> dict[str, set[_Chain]]:
    """Return, by the name of a method, the chains that calls of it pass on."""
    given: dict[str, set[_Chain]] = {}
    for method in methods:
        for call in method.calls():
            if isinstance(call.func, ast.Attribute):
                given.setdefault(call.func.attr, set()).update(method.aliases_in(values_given(call)))
    return given


class _Method:
    """One method of a module: where it may write what it reads of the module."""

    def __init__(self, function: FunctionType, definition: Function) -> None:
        self._function, self._definition = function, definition
        parameters = Parameters(definition)
        self._self = parameters.positional[0] if parameters.positional else "self"
        self._arguments = parameters.named - {self._self}
        self._assigned = assigned_values(definition)
        self._conditions = Conditions(definition)
        self._variables = (parameters.every | self._assigned.keys()) - {self._self}
        # Under which conditions other methods call it.
        self._is_decided = False
        self._asked: set[_Chain] = set()

    def calls(self) -> Iterator[ast.Call]:
        """Yield the calls."""
        return (node for node in ast.walk(self._definition) if isinstance(node, ast.Call))

    def take_conditions_of_calls(self, methods: Iterable[_Method]) -> None:
        """Take over the conditions under which `methods` call this one."""
        for caller in methods:
            for call in caller.calls():
                if isinstance(call.func, ast.Attribute) and call.func.attr == self._function.__name__:
                    is_decided, asked = caller.conditions_of(call)
                    self._is_decided = self._is_decided or is_decided
                    self._asked |= asked

    def conditions_of(self, node: ast.AST) -> tuple[bool, frozenset[_Chain]]:
        """Say whether values of variables may decide whether a node runs, and which chains may."""
        tests = self._conditions.of(node)
        is_decided = self._is_decided or any(names_variable(test, self._variables) for test in tests)
        asked = self.chains_in(part for test in tests for part in asked_values(test))
        return is_decided, frozenset(self._asked | asked)

    def writes(self, given: dict[str, set[_Chain]]) -> Iterator[_Write]:
        """Yield the places that may write; `given` are the chains that arguments may be, by the name of the method."""
        for node, training in _with_modes(self._definition, None, self._self):
            targets, lines, is_certain = self._written_by(node)
            chains = self.aliases_in(targets)
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            if names & self._arguments:
                chains |= given.get(self._function.__name__, set())
            reads = frozenset(self.chains_in(ast.iter_child_nodes(node)))
            called: _Chain = ()
            if not chains and isinstance(node, ast.Call) and (called := self._chain_of(node.func)):
                chains = self.aliases_in(values_given(node))
            if chains:
                is_decided, asked = self.conditions_of(node)
                yield _Write(lines, frozenset(chains), reads, training, is_decided or not is_certain, asked, called)

    def _written_by(self, node: ast.AST) -> tuple[list[ast.expr], frozenset[Line], bool]:
        """Return what a node writes, at which lines, and whether it does so in any case where it runs."""
        file = self._function.__code__.co_filename
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
        lines = frozenset((file, line) for line in range(first, last + 1))
        if isinstance(node, ast.AugAssign):
            return [node.target], lines, True
        if isinstance(node, (ast.Assign, ast.Delete)):
            return [each for each in node.targets if isinstance(each, (ast.Subscript, ast.Attribute))], lines, True
        if isinstance(node, ast.Call):
            return self._written_by_call(node, lines)
        return [], lines, True

    def _written_by_call(self, call: ast.Call, lines: frozenset[Line]) -> tuple[list[ast.expr], frozenset[Line], bool]:
        if name_called(call) == "setattr" and len(call.args) == 3:
            return [ast.Call(ast.Name("getattr"), call.args[:2], [])], lines, True
        called = called_in(call, self._function)
        use = argument_use(called) if is_own_function(called) else ArgumentUse()
        if use.lines:
            return values_given(call), use.lines, not use.sometimes
        return written_by_call(call, self._function), lines, True

    def chains_in(self, nodes: Iterable[ast.AST]) -> set[_Chain]:
        """Return the chains that expressions contain, and those that are in variables which they name."""
        return self._found(nodes, lambda node: list(ast.iter_child_nodes(node)))

    def aliases_in(self, nodes: Iterable[ast.AST]) -> set[_Chain]:
        """Return the chains of which expressions are a view, an item or the result of a method."""
        return self._found(nodes, lambda node: list(aliased_parts(node, self._function)))

    def _found(self, nodes: Iterable[ast.AST], inside: Callable[[ast.AST], list[ast.AST]]) -> set[_Chain]:
        found: set[_Chain] = set()
        pending, seen = list(nodes), set[str]()
        while pending:
            node = pending.pop()
            called = node.func if isinstance(node, ast.Call) and not _is_getattr(node) else None
            chain = self._chain_of(node if called is None else called)
            if chain and called is not None:
                found.add((*chain, _CALL))
            if chain and called is None:
                found.add(chain)
            elif isinstance(node, ast.Name):
                pending += [] if node.id in seen else self._assigned.get(node.id, [])
                seen.add(node.id)
            else:
                pending += inside(node)
        return found

    def _chain_of(self, node: ast.AST) -> _Chain:
        """Return the attributes along `self.block.weight`, and `getattr(self.block, "weight")`; nothing elsewhere."""
        if isinstance(node, ast.Call) and _is_getattr(node):
            owner, name = node.args[:2]
            # Another name than a constant may be that of anything which the module has.
            last = name.value if isinstance(name, ast.Constant) and type(name.value) is str else "parameters"
            is_self = isinstance(owner, ast.Name) and owner.id == self._self
            around = self._chain_of(owner)
            return (*around, last) if around or is_self else ()
        root, *names = names_along(node)
        return tuple(names) if root == self._self else ()


def _is_getattr(call: ast.Call) -> bool:
    return name_called(call) == "getattr" and len(call.args) > 1


def _with_modes(node: ast.AST, training: bool | None, own: str) -> Iterator[tuple[ast.AST, bool | None]]:
    """Yield the nodes inside, each with the mode of the module `own` in which alone it runs."""
    for child in ast.iter_child_nodes(node):
        mode = training
        if isinstance(node, ast.If):
            wanted = _mode_of(node.test, own)
            if child in node.body and wanted is not None:
                mode = wanted
            elif child in node.orelse and isinstance(node.test, (ast.Attribute, ast.UnaryOp)) and wanted is not None:
                mode = not wanted
        yield child, mode
        yield from _with_modes(child, mode, own)


def _mode_of(test: ast.expr, own: str) -> bool | None:
    """Return the mode that a condition wants: True for `self.training and n > 1`, False for `not self.training`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((mode for each in test.values if (mode := _mode_of(each, own)) is not None), None)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        mode = _mode_of(test.operand, own) if isinstance(test.operand, ast.Attribute) else None
        return None if mode is None else not mode
    is_mode = isinstance(test, ast.Attribute) and names_along(test) == [own, "training"]
    return True if is_mode else None
