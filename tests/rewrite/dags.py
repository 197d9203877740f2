"""Random graphs, patterns cut out of them, and replacements that compute the same in another way."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Draw = Callable[[int], int]
SIZE = 6


def function(target: Callable[..., Any], *constants: Any, **named: Any) -> Callable[..., Any]:
    return lambda graph, *args: graph.call_function(target, (*args, *constants), named or None)


def method(name: str, *constants: Any) -> Callable[..., Any]:
    return lambda graph, *args: graph.call_method(name, (*args, *constants))


# Name, number of operands, and how it is recorded.
PURE: dict[str, tuple[int, Callable[..., Any]]] = {
    "relu": (1, function(torch.relu)),
    "neg": (1, function(torch.neg)),
    "sigmoid": (1, function(torch.sigmoid)),
    "add": (2, function(torch.add)),
    "mul": (2, function(torch.mul)),
    "sub": (2, function(operator.sub)),
    "double": (1, function(torch.mul, 2.0)),
    "cat": (2, lambda graph, *args: graph.call_method("sum", (graph.call_function(torch.stack, (list(args),)), 0))),
}
MIXED: dict[str, tuple[int, Callable[..., Any]]] = {
    "relu": (1, function(torch.relu)),
    "neg": (1, function(torch.neg)),
    "add": (2, function(torch.add)),
    "mul": (2, function(operator.mul)),
    "view": (1, method("view", SIZE)),
    "slice": (1, function(operator.getitem, slice(None))),
    "clone": (1, method("clone")),
    "flip": (1, method("flip", 0)),
    "relu_": (1, function(torch.relu_)),
    "add_": (2, method("add_")),
    "iadd": (2, function(operator.iadd)),
    "mul_": (1, method("mul_", 0.5)),
    "dropout": (1, function(functional.dropout, p=0.5, training=True)),
}
OTHER_WAYS: dict[str, Callable[..., Any]] = {
    "clamp_min": function(torch.clamp_min, 0),
    "reshape": method("reshape", SIZE),
    "half": function(torch.mul, 0.5),
    "minus": function(torch.mul, -1),
}
# What has the same value; whether it shares or writes the same memory is for the rewriter to see.
ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "relu": ("relu_", "clamp_min"), "relu_": ("relu",), "view": ("slice", "clone", "reshape"),
    "slice": ("view", "clone"), "clone": ("view",), "add_": ("add", "iadd"), "iadd": ("add", "add_"),
    "add": ("add_",), "mul_": ("half",), "neg": ("minus",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Dag:
    """Operations by name with the indices of their operands; an input has no name. `outputs` are indices."""

    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[int, ...]

    @property
    def input_count(self) -> int:
        return sum(not name for name, _ in self.nodes)

    def module(self, library: Any) -> Any:
        """Build the GraphModule of this in `library`."""
        graph, values = library.Graph(), []
        operations = {name: build for name, (_, build) in (PURE | MIXED).items()} | OTHER_WAYS
        for name, operands in self.nodes:
            arguments = [values[index] for index in operands]
            values.append(operations[name](graph, *arguments) if name else graph.placeholder(f"x{len(values)}"))
        results = [values[index] for index in self.outputs]
        graph.output(results[0] if len(results) == 1 else tuple(results))
        return library.GraphModule(nn.Module(), graph)


def draw_dag(draw: Draw, kinds: dict[str, tuple[int, Any]]) -> Dag:
    """Draw inputs, operations on what is there, and outputs."""
    nodes: list[tuple[str, tuple[int, ...]]] = [("", ())] * (1 + draw(2))
    inputs, names = len(nodes), list(kinds)
    for _ in range(3 + draw(12)):
        name = names[draw(len(names))]
        recent = min(len(nodes), 4 if draw(3) else len(nodes))
        nodes.append((name, tuple(len(nodes) - 1 - draw(recent) for _ in range(kinds[name][0]))))
    outputs = tuple(inputs + draw(len(nodes) - inputs) for _ in range(1 + draw(3)))
    return Dag(tuple(nodes), outputs)


def cut(draw: Draw, dag: Dag) -> Dag:
    """Draw a part of `dag` as a pattern; what others read is returned."""
    chosen = {dag.input_count + draw(len(dag.nodes) - dag.input_count)}
    for _ in range(draw(5)):
        near = [index for index in _near(dag, chosen) if dag.nodes[index][0]]
        if near:
            chosen.add(near[draw(len(near))])
    places: dict[int, int] = {}
    nodes: list[tuple[str, tuple[int, ...]]] = []
    for index in sorted(chosen):
        for operand in dag.nodes[index][1]:
            if operand not in chosen and operand not in places:
                places[operand] = len(nodes)
                nodes.append(("", ()))
    for index in sorted(chosen):
        places[index] = len(nodes)
        name, operands = dag.nodes[index]
        nodes.append((name, tuple(places[operand] for operand in operands)))
    inside = {operand for index in chosen for operand in dag.nodes[index][1]}
    outside = {operand for index, (_, operands) in enumerate(dag.nodes) if index not in chosen for operand in operands}
    returned = [index for index in sorted(chosen) if index not in inside]
    returned += [index for index in sorted(chosen & inside) if index in outside or index in dag.outputs]
    return Dag(tuple(nodes), tuple(places[index] for index in returned))


def _near(dag: Dag, chosen: set[int]) -> list[int]:
    near = {operand for index in chosen for operand in dag.nodes[index][1]}
    known = near | chosen
    near |= {index for index, (_, operands) in enumerate(dag.nodes) if known.intersection(operands)}
    return sorted(near - chosen)


def rewritten(draw: Draw, pattern: Dag) -> Dag:
    """Draw another way to compute what `pattern` does, where that is known."""

    def other(name: str) -> str:
        choices = ALTERNATIVES.get(name, ())
        return (name, name, *choices)[draw(2 + len(choices))]

    return Dag(tuple((other(name) if name else name, operands) for name, operands in pattern.nodes), pattern.outputs)


def run(module: Any, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return the outputs, the inputs as they are then, and a random number drawn after."""
    given = [value.clone() for value in inputs]
    torch.manual_seed(3)
    result = module(*given)
    return list(result) if isinstance(result, tuple) else [result], given, torch.rand(1)


def is_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))
