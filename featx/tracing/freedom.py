"""Find out which dimensions of the inputs a trace leaves open, by tracing at other sizes and comparing.

Sizes that the model turns into lists, loops or indices leave no node behind. So where Python has seen a size, the model
is traced again with other ones: a dimension for which the graph stays the same is free, one for which it changes, or
which the model refuses to change, is fixed and checked at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from featx.errors import FeatxError
from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.example import ExampleTrace, ExampleTracer, IsEnough
from featx.tracing.following import LOSSY
from featx.tracing.guards import check_size
from featx.tracing.recording import NeedsValues
from featx.tracing.scalars import Diverged

FREE = "free"
CHANGED = "fixed: the model does something else at another length"
REFUSED = "fixed: the model takes no other length"
# Dimensions at one position that have one length change together.
_Group = tuple[int, int]


@dataclass
class FreeDims:
    """Which dimensions of the inputs of a trace may differ from the example.

    Attributes:
        of: for each input tensor, by name (`"x"`, `"images[0]"`), what is known of each dimension: "free", or "fixed:"
            and why.
    """

    of: dict[str, list[str]] = field(default_factory=lambda: dict[str, list[str]]())

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {', '.join(dims)}" for name, dims in self.of.items())


def trace_checked(
    tracer: ExampleTracer,
    root: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_enough: IsEnough | None = None,
) -> tuple[ExampleTrace, FreeDims]:
    """Trace `root` on an example and at other sizes; return the first trace, with checks of what is fixed.

    One trace where the model's own code sees no size; else two, or one more for each group of dimensions where the
    model does not accept all changes at once.

    Raises:
        TraceError: the example cannot be traced.
    """
    trace = tracer.trace(root, args, kwargs, is_enough)
    inputs = list(_tensors(trace, args, kwargs))
    groups = {(dim, size) for _, _, tensor in inputs for dim, size in enumerate(tensor.shape)}
    known = dict.fromkeys(groups, FREE)
    if trace.saw_sizes or trace.is_real:
        known = _Variation(tracer, args, kwargs, trace, is_enough).test(inputs, sorted(groups))
    free = FreeDims({name: [known[group] for group in enumerate(tensor.shape)] for name, _, tensor in inputs})
    _check_fixed(trace.graph, inputs, known)
    return trace, free


class _Variation:
    """Traces of one model at other sizes than those of its example."""

    def __init__(
        self, tracer: ExampleTracer, args: Any, kwargs: Any, trace: ExampleTrace, is_enough: IsEnough | None
    ) -> None:
        self._tracer = tracer
        self._example = (args, dict(kwargs))
        self._trace = trace
        self._is_enough = is_enough

    def test(self, inputs: list[tuple[str, Any, torch.Tensor]], groups: list[_Group]) -> dict[_Group, str]:
        likely = {
            (dim, size)
            for _, _, tensor in inputs
            for dim, size in enumerate(tensor.shape)
            if dim == 0 or dim > 1 or not tensor.is_floating_point() or tensor.dim() == 3
        }
        known: dict[_Group, str] = {}
        if len(likely) > 1 and self._outcome(sorted(likely)) == FREE:
            known.update(dict.fromkeys(likely, FREE))
        for group in groups:
            if group not in known:
                known[group] = self._outcome([group])
            if group[0] == 0 or not known[group].startswith(REFUSED):
                continue
            if group in likely and "Assert" not in known[group]:  # assertions, as a rule, want one length
                # It may be as long as the model takes: a table of positions may have no more.
                known[group] = self._free_if(group, known[group], lambda dim, size, number: max(size // 2, 1))
            if known[group] != FREE and self._trace.converting:
                # `int(n ** 0.5)` as the side of a square: where that is what n must be, four times n is it too.
                known[group] = self._free_if(group, known[group], lambda dim, size, number: 4 * size)
        # A remainder that is the same at twice the length is another one at the next length.
        suspects = _with_remainders(self._trace.graph)
        for group in [group for group, outcome in known.items() if outcome == FREE]:
            if suspects is None or group in suspects:
                outcome = self._outcome([group], lambda dim, size, number: size + 1)
                if outcome == CHANGED:
                    known[group] = outcome
        return known

    def _free_if(self, group: _Group, reason: str, other: Callable[[int, int, int], int]) -> str:
        return FREE if self._outcome([group], other) == FREE else reason

    def _outcome(self, groups: list[_Group], other: Callable[[int, int, int], int] | None = None) -> str:
        usual = _other_size_for_real if self._trace.is_real else _other_size
        changes = {group: (other or usual)(*group, number) for number, group in enumerate(groups)}
        args, kwargs = _resized(self._example, changes, self._trace.is_real)
        try:
            modes = {"is_real": self._trace.is_real, "gradients": self._trace.gradients}
            around = self._trace.surroundings
            again = self._tracer.run_once(around, args, kwargs, self._is_enough, earlier=self._trace, **modes)
        except Diverged:
            return CHANGED
        except (NeedsValues, Exception) as error:
            if isinstance(error, FeatxError):
                return "fixed: at another length the model cannot be followed"
            return f"{REFUSED} ({type(error).__name__})"
        if is_same_graph(again.graph, self._trace.graph):
            return FREE
        return CHANGED


def _with_remainders(graph: Graph) -> set[_Group] | None:
    """Return the dimensions of inputs of which the model computes a remainder; None where it may be any of them."""
    pending = [node for node in graph.nodes if node.op == "call_function" and node.target in LOSSY]
    seen: set[Node] = set()
    found: set[_Group] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        group = _length_of_input(node)
        if group is not None:
            found.add(group)
        elif node.op == "call_function" and node.target.__module__ == "_operator":
            pending += node.all_input_nodes
        else:
            return None
    return found


def _length_of_input(node: Node) -> _Group | None:
    if node.target is not operator.getitem or not isinstance(node.args[0], Node) or type(node.args[1]) is not int:
        return None
    shape, position = node.args
    if shape.target is not getattr or shape.args[1] != "shape" or cast(Node, shape.args[0]).op != "placeholder":
        return None
    lengths = cast(Node, shape.args[0]).meta["shape"]
    return position % len(lengths), lengths[position]


def _other_size(dim: int, size: int, number: int) -> int:
    # Far enough away that an integer division of it changes too, and a multiple: many models need one.
    return 2 * size + 1 if dim == 0 else size * (2 + number % 3)


def _other_size_for_real(dim: int, size: int, number: int) -> int:
    # What is computed for real takes about as long as at the size of the example.
    if dim == 0:
        return size + 1
    return size // 2 if number % 2 and size > 1 else 2 * size


def _resized(value: Any, changes: Mapping[_Group, int], has_values: bool) -> Any:
    if isinstance(value, torch.Tensor):
        shape = [changes.get((dim, size), size) for dim, size in enumerate(value.shape)]
        if not has_values:
            return value.new_empty(shape)
        for dim, (size, wanted) in enumerate(zip(value.shape, shape, strict=True)):
            if wanted != size:
                # The values repeat, so that what depends on them stays likely to go the same way.
                value = value.repeat_interleave(-(-wanted // max(size, 1)), dim).narrow(dim, 0, wanted)
        return value
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return type(value)({key: _resized(item, changes, has_values) for key, item in items})
    if isinstance(value, (tuple, list)):
        items = [_resized(item, changes, has_values) for item in cast(list[Any], value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _tensors(
    trace: ExampleTrace, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, list[Any], torch.Tensor]]:
    """Yield name, path (a placeholder and keys) and tensor of each input."""
    bound = trace.signature.bind(*args, **kwargs)
    nodes = {node.target.lstrip("*"): node for node in trace.graph.nodes if node.op == "placeholder"}
    for name, value in bound.arguments.items():
        yield from _nested(name, [nodes[name]], value)


def _nested(name: str, path: list[Any], value: Any) -> Iterator[tuple[str, list[Any], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, path, value
    elif isinstance(value, dict):
        for key, item in cast(dict[Any, Any], value).items():
            yield from _nested(f"{name}[{key!r}]", [*path, key], item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(cast(list[Any], value)):
            yield from _nested(f"{name}[{index}]", [*path, index], item)


def _check_fixed(graph: Graph, inputs: list[tuple[str, list[Any], torch.Tensor]], known: Mapping[_Group, str]) -> None:
    # Behind the checks of what the inputs are.
    first = next(node for node in graph.nodes if node.op != "placeholder" and not node.meta.get("is_check_of_input"))
    with graph.inserting_before(first):
        for name, (placeholder, *keys), tensor in inputs:
            node = placeholder
            for dim, size in enumerate(tensor.shape):
                reason = known[dim, size]
                if reason == FREE:
                    continue
                if node is placeholder:
                    for key in keys:
                        node = graph.call_function(operator.getitem, (node, key))
                check = graph.call_function(check_size, (node, dim, size, f"input '{name}' is {reason}"))
                check.meta["is_guard"] = True
