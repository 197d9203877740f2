"""Start in the middle of a model: values that it would compute become the inputs of an extractor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, RequestError
from featx.examples import Example
from featx.features.requests.edits import replace_uses
from featx.features.requests.request import Request, as_request
from featx.ir.ancestors import with_ancestors
from featx.ir.effects import Effects
from featx.ir.form import computes_form, reads_form
from featx.ir.graph import Graph
from featx.ir.identifiers import is_plain
from featx.ir.memory import MemoryGroups
from featx.ir.names import identifier_of, shown_name
from featx.ir.node import Node
from featx.tracing.guards.guards import (
    check_aliases,
    check_decision,
    check_dtype,
    check_is_tensor,
    check_rank,
    check_size,
)
from featx.tracing.sizes.outcomes import FreeDims
from featx.tree import clone_tensors

# Any dimension.
_UNKNOWN = -1


class Starts:
    """What the inputs of an extractor are in place of the model's.

    Args:
        inputs: names of nodes, or modules of the model; in a dict their values are the names of the parameters.
        model: whose nodes are meant.

    Raises:
        ArgumentTypeError: `inputs` is neither a list nor a dict, or has something else than names.
        RequestError: it is empty, has a pattern, two inputs have one name, or a name is none that Python takes.
    """

    def __init__(self, inputs: Any, model: nn.Module) -> None:
        request = as_request(inputs, "inputs", model)
        if request.features:
            named = next(name for name, key in request.items() if key in request.features)
            raise ArgumentTypeError(
                f"inputs are given as they are: for '{named}' there can be no Feature and no list of keys; give one "
                "name for the parameter, or none"
            )
        if request.pending or request.expanded:
            raise RequestError("inputs may not have patterns or classes; name each value that is given")
        self._parameters = {name: identifier_of(key) for name, key in request.items()}
        for name, parameter in self._parameters.items():
            if isinstance(inputs, Mapping) and request[name] not in (name, parameter):
                raise RequestError(
                    f"'{request[name]}', the name of the parameter for '{name}', is no name that Python takes; give "
                    f"another one, such as '{parameter}'"
                )
            if not is_plain(parameter):
                raise RequestError(f"'{parameter}', the name of the parameter for '{name}', is a keyword of Python")
        if len(set(self._parameters.values())) < len(self._parameters):
            names = ", ".join(self._parameters)
            raise RequestError(f"two of {names} get one name of a parameter; give a dict with others")

    def with_names(self, request: Request) -> Request:
        """Return a request that has the names of the inputs too."""
        others = {name: f"input {name}" for name in self._parameters if name not in request}
        return Request({**dict(request), **others}, request.features, request.expanded, request.pending)

    def make(
        self, graph: Graph, requested: Mapping[str, Node], request: Request, root: nn.Module, free_dims: FreeDims | None
    ) -> dict[str, Node]:
        """Let a traced graph begin at the inputs, and return the requested nodes by key. O(nodes).

        What the model decides before them by the form of its own inputs no longer shows; so the inputs must have the
        form that they had on the example, as far as that matters.

        Args:
            graph: is changed.
            requested: the nodes by key, those of `with_names` too.
            request: the request of the caller.
            root: the model.
            free_dims: which dimensions of the model's inputs may differ.

        Raises:
            RequestError: something else has to be given too, or an input is not used; the message names it.
        """
        keys = self.with_names(request)
        given: dict[Node, Node] = {}
        first = next(iter(graph.nodes))
        for name, parameter in self._parameters.items():
            node = requested[keys[name]]
            if node.op == "placeholder":
                node.args = ()
                given[node] = node
                continue
            with graph.inserting_before(first):
                start = graph.placeholder(parameter)
            start.meta.update({key: node.meta[key] for key in ("shape", "dtype") if key in node.meta})
            start.meta.update(qualified_name=name, nn_module_stack={})
            replace_uses(graph, node, start)
            given[node] = start
        for start in reversed(given.values()):  # in the order in which they were asked for
            if start is not next(iter(graph.nodes)):
                next(iter(graph.nodes)).prepend(start)
        found = {key: given.get(requested[key], requested[key]) for key in request.values() if key in requested}
        starts = list(given.values())
        _read_devices_of(graph, starts)
        _require_all(graph, starts, found.values(), self._parameters)
        _require_state(graph, starts, found.values(), root)
        _require_use(graph, [start for node, start in given.items() if start is not node], found.values(), root)
        fixed = _drop_guards(graph, starts)
        if free_dims is not None:
            fixed.note_dims(free_dims)
        new = [start for node, start in given.items() if start is not node]
        _erase_what_follows_from_others(graph, starts)
        _clone_what_is_written(graph, new, root)
        _check_form(graph, new, fixed)
        return found


def stand_in(graph: Graph) -> Example:
    """Return tensors without values for the inputs of a graph, as far as their forms are known. O(inputs)."""
    known = [node for node in graph.find_nodes(op="placeholder") if "shape" in node.meta]
    given = {
        str(each.target): torch.empty(each.meta["shape"], dtype=each.meta["dtype"], device="meta") for each in known
    }
    return Example((), given, "the inputs of the graph")


def _read_devices_of(graph: Graph, starts: Collection[Node]) -> None:
    """Let calls on the device of a value that follows from other inputs alone ask a start for its device.

    Where the model is spread over several devices, these are others, and torch refuses to compute with the result.
    """
    tensors = [start for start in starts if "shape" in start.meta]
    from_others = _closure(_others(graph, starts), graph) - _closure(starts, graph)
    for node in [each for each in graph.nodes if each in from_others] if tensors else []:
        if node.op == "call_function" and node.target is getattr and node.args[1:] == ("device",):
            node.args = (tensors[0], "device")


def _require_all(graph: Graph, starts: Collection[Node], requested: Collection[Node], names: Iterable[str]) -> None:
    """Raise where the requested nodes need what follows from other inputs of the model alone."""
    behind, from_others = _closure(starts, graph), _closure(_others(graph, starts), graph)
    crossing: dict[str, None] = {}
    missing: list[Node] = []
    pending, seen = list(requested), set(requested)
    while pending:
        node = pending.pop()
        # An object that the model makes of its parts has no name.
        is_object = node.op == "call_function" and isinstance(node.target, type)
        if node not in behind and node in from_others and not is_object:
            crossing.update(dict.fromkeys(_names_of_tensors(node)))
            missing.append(node)
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                pending.append(source)
    ahead = [shown_name(node) for node in requested if node in missing]
    if ahead:
        raise RequestError(
            f"'{ahead[0]}' is requested and does not follow from {', '.join(map(repr, names))}: it lies before that, "
            "or in another branch; leave it out, or start earlier"
        )
    if crossing:
        deciding = [name for name in _inputs_whose_values_decide(graph, starts) if name not in crossing]
        too = f", and {', '.join(map(repr, deciding))}, whose values decide what the model runs" if deciding else ""
        raise RequestError(
            f"the requested values cannot be computed from {', '.join(map(repr, names))} alone; inputs must have "
            f"{', '.join(map(repr, crossing))} too{_or_inputs(graph, missing, crossing)}{too}"
        )


def _require_state(graph: Graph, starts: Collection[Node], requested: Collection[Node], root: nn.Module) -> None:
    """Raise where the requested nodes read what a call has left on the model that follows from other inputs alone."""
    effects = Effects(graph, root)
    memory = MemoryGroups(graph, effects)
    left_out, needed = _closure(_others(graph, starts), graph), with_ancestors(requested)
    read = set[int]()
    for node in reversed(graph.nodes):
        if node in needed and node.op != "placeholder":
            read |= memory.read_by(node)
        elif node in left_out and node.op != "placeholder" and not read.isdisjoint(memory.changed_by(node)):
            inputs = ", ".join(
                repr(str(each.target)) for each in _others(graph, starts) if node in _closure([each], graph)
            )
            raise RequestError(
                f"'{node.meta.get('qualified_name', node.name)}' lies before the inputs and changes what the model "
                f"keeps, which the requested values read; inputs must have {inputs} too"
            )


def _require_use(graph: Graph, starts: Collection[Node], requested: Collection[Node], root: nn.Module) -> None:
    """Raise where nothing that is requested, and no state that it reads, is computed from a value that is given."""
    needed = with_ancestors(requested)
    unused = [start for start in starts if start not in needed]
    if not unused:
        return
    memory = MemoryGroups(graph, Effects(graph, root))
    read = {group for node in needed if node.op != "placeholder" for group in memory.read_by(node)}
    for start in unused:
        if all(read.isdisjoint(memory.changed_by(node)) for node in _closure([start], graph) - {start}):
            used = ", ".join(repr(shown_name(node)) for node in graph.find_nodes(op="placeholder") if node in needed)
            from_what = (
                f"all that is requested follows from {used} alone" if used else "what is requested needs no input"
            )
            raise RequestError(
                f"the input '{shown_name(start)}' is not used: {from_what}; leave '{shown_name(start)}' out of inputs, "
                "or request something that lies between"
            )


def _or_inputs(graph: Graph, missing: Collection[Node], names: Collection[str]) -> str:
    """Name the inputs of the model from which missing values follow, for an error, if these are others."""
    needed = with_ancestors(missing)
    inputs = [str(node.target) for node in graph.find_nodes(op="placeholder") if node in needed]
    return "" if set(inputs) == set(names) else f", or else {', '.join(map(repr, inputs))}, from which that follows"


def _erase_what_follows_from_others(graph: Graph, starts: Collection[Node]) -> None:
    unknown = _closure(_others(graph, starts), graph)
    for node in reversed([node for node in graph.nodes if node in unknown]):
        if not node.users and node.op != "output":
            graph.erase_node(node)


def _others(graph: Graph, starts: Collection[Node]) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if node not in starts]


def _closure(nodes: Iterable[Node], graph: Graph) -> set[Node]:
    found = set(nodes)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _names_of_tensors(node: Node) -> list[str]:
    """Return the name of a tensor, or of the tensors of whose form a number is made."""
    while "shape" not in node.meta and node.all_input_nodes and computes_form(node):
        node = node.all_input_nodes[0]
    return [shown_name(node)]


@dataclass
class _Fixed:
    """What the given values must share with those of the example: lengths of dimensions, and the dtype."""

    batch: bool = False
    places: bool = False
    dtype: bool = False

    def note_dims(self, free_dims: FreeDims) -> None:
        """Note which dimensions of the model's inputs it does something else for."""
        for first, *others in free_dims.outcomes.values():
            self.batch = self.batch or not first.is_free
            self.places = self.places or not all(each.is_free for each in others)

    def note_guard(self, guard: Node) -> None:
        """Note what a guard asks that follows from the form of values before the start."""
        reads = [guard, *_behind_guard(guard)]
        self.dtype = self.dtype or guard.target is check_dtype or any("dtype" in read.args for read in reads)
        dims = {_dim_of(read) for read in reads if reads_form(read) or read.target is getitem} - {None}
        self.batch = self.batch or not dims.isdisjoint({0, _UNKNOWN})
        self.places = self.places or bool(dims - {0})


def _dim_of(read: Node) -> int | None:
    """Return which length is read of a shape; None for what is no length, and `_UNKNOWN` for all of them."""
    if read.target == "size" and len(read.args) > 1:
        return read.args[1] if type(read.args[1]) is int else _UNKNOWN
    if read.target is getitem:
        parts: list[Any] = list(read.args)
        source, index = parts[:2]
        is_of_shape = isinstance(source, Node) and ("shape" in source.args or source.target == "size")
        return (index if type(index) is int else _UNKNOWN) if is_of_shape else None
    is_whole = read.target == "size" or "shape" in read.args
    return _UNKNOWN if is_whole and not all(user.target is getitem for user in read.users) else None


def _behind_guard(guard: Node) -> list[Node]:
    """Return the nodes of which the numbers are made that a guard checks, without the tensors."""
    found: list[Node] = []
    pending = guard.all_input_nodes
    while pending:
        node = pending.pop()
        if "shape" not in node.meta and node not in found:
            found.append(node)
            pending += node.all_input_nodes
    return found


def _drop_guards(graph: Graph, starts: Collection[Node]) -> _Fixed:
    """Remove the guards that follow from other inputs of the model alone, and return what follows from that.

    Raises:
        RequestError: one is about values.
    """
    others = _others(graph, starts)
    from_others = _closure(others, graph)
    fixed = _Fixed()
    for guard in [node for node in graph.nodes if node.meta.get("is_guard") and node in from_others]:
        if guard.target is check_aliases:
            _narrow_aliases(guard, others)
            continue
        is_about_inputs = guard.meta.get("is_check_of_input") or guard.meta.get("is_form_check")
        if guard.target not in (check_rank, check_size, check_is_tensor) and not is_about_inputs:
            if _is_about_values(guard):
                missing = [name for name in _placeholders_of(guard) if name in {each.target for each in others}]
                raise RequestError(
                    f"inputs must have {', '.join(map(repr, missing))} too: "
                    f"{'its values decide' if len(missing) == 1 else 'their values decide'} what the model runs "
                    f"({guard.args[2] if guard.target is check_decision else guard.args[-1]})"
                )
            fixed.note_guard(guard)
        graph.erase_node(guard)
    return fixed


def _inputs_whose_values_decide(graph: Graph, starts: Collection[Node]) -> list[str]:
    """Return the names of the inputs of the model that are not given, and whose values decide what it runs."""
    others = _others(graph, starts)
    from_others = _closure(others, graph)
    guards = [node for node in graph.nodes if node.meta.get("is_guard") and node in from_others]
    names = {str(each.target) for each in others}
    found = (name for guard in guards if _is_about_values(guard) for name in _placeholders_of(guard) if name in names)
    return list(dict.fromkeys(found))


def _is_about_values(guard: Node) -> bool:
    """Say whether a guard checks more than the form of values, or what the inputs are."""
    if guard.target in (check_rank, check_size, check_is_tensor, check_dtype, check_aliases):
        return False
    is_about_inputs = guard.meta.get("is_check_of_input") or guard.meta.get("is_form_check")
    return not is_about_inputs and not all(map(_is_of_form, guard.all_input_nodes))


def _narrow_aliases(guard: Node, missing: Collection[Node]) -> None:
    """Let a check of which inputs are one tensor look at those that are left.

    Raises:
        RequestError: the example gives one tensor as two inputs, and what the model does then depends on it.
    """
    inputs, expected, *others = cast("tuple[tuple[Node, ...], tuple[int, ...] | None, Any]", guard.args)
    tensors = [node for node in inputs if node in missing and ("shape" in node.meta or not node.args)]
    if expected is not None and tensors:
        names = ", ".join(repr(node.target) for node in tensors)
        raise RequestError(
            f"inputs must have {names} too: the example gives one tensor as two inputs, and the model writes one of "
            "them, or may compare them with `is`; or give copies in the example"
        )
    guard.args = (tuple(node for node in inputs if node not in missing), expected, *others)


def _placeholders_of(node: Node) -> list[str]:
    return sorted(each.target for each in with_ancestors([node]) if each.op == "placeholder")


def _is_of_form(node: Node) -> bool:
    """Say whether a value is made of the form of tensors alone."""
    if "shape" in node.meta:
        return False
    return computes_form(node) and all("shape" in each.meta or _is_of_form(each) for each in node.all_input_nodes)


def _clone_what_is_written(graph: Graph, starts: Iterable[Node], root: nn.Module) -> None:
    """Let the model write into copies of the values that are given to it in the middle."""
    memory = MemoryGroups(graph, Effects(graph, root))
    written = memory.written()
    for start in starts:
        if memory.of(start) in written:
            users = list(start.users)
            with graph.inserting_before(_first_behind_inputs(graph)):
                clone = graph.call_function(clone_tensors, (start,))
            clone.meta.update({key: start.meta[key] for key in ("shape", "dtype") if key in start.meta})
            for user in users:
                user.replace_input_with(start, clone)


def _check_form(graph: Graph, starts: Iterable[Node], fixed: _Fixed) -> None:
    with graph.inserting_before(_first_behind_inputs(graph)):
        for start in starts:
            shape, dtype = start.meta.get("shape"), start.meta.get("dtype")
            if shape is None:
                continue
            what = f"input '{start.target}'"
            checks: list[tuple[Any, ...]] = [(check_is_tensor, start, what), (check_rank, start, len(shape), what)]
            reason = f"{what} is fixed: the model has decided by sizes of its own inputs"
            dims = [dim for dim in range(len(shape)) if (fixed.places if dim else fixed.batch)]
            checks += [(check_size, start, dim, int(shape[dim]), reason) for dim in dims]
            if fixed.dtype:
                read = graph.call_function(getattr, (start, "dtype"))
                checks.append((check_dtype, read, [dtype], f"the dtype of {what}"))
            for function, *args in checks:
                check = graph.call_function(function, tuple(args))
                check.meta["is_guard"] = check.meta["is_check_of_input"] = True


def _first_behind_inputs(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op != "placeholder")
