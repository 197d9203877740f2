"""Cut a program of `torch.export` into parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from featx.errors import OptimizationError


@dataclass(frozen=True)
class Part:
    """Some calls of a program, as a module that shares its weights.

    Attributes:
        module: it takes the values of `inputs` and returns those of `outputs` in a tuple.
        inputs: nodes of the program, other than weights.
        outputs: nodes of the program.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def inputs_of(program: torch.export.ExportedProgram) -> list[Node]:
    """Return the nodes of the inputs of a call, in order; weights are no such ones."""
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [by_name[name] for name in program.graph_signature.user_inputs if isinstance(name, str)]


def outputs_of(program: torch.export.ExportedProgram) -> list[Node]:
    """Return the nodes that are returned, in order."""
    (returned,) = program.graph.output_node().args
    return [node for node in returned if isinstance(node, Node)]  # pyright: ignore


def forms_of(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """Return for each node a tensor without values that has the shape and the dtype of its value."""
    return [node.meta["val"] for node in nodes]


def calls_of(program: torch.export.ExportedProgram) -> list[Node]:
    """Return the calls in order, without checks of dtypes and devices: they hold for all inputs of one form."""
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    return [node for node in nodes if node.target is not torch.ops.aten._assert_tensor_metadata.default]


def part_of(program: torch.export.ExportedProgram, calls: Collection[Node], outputs: Iterable[Node]) -> Part:
    """Return calls as a module. What they take from other calls becomes its inputs. O(nodes).

    Args:
        program: it writes no tensor in place.
        calls: some of its calls.
        outputs: those of the calls that are needed elsewhere; they may be weights too.

    Raises:
        OptimizationError: the program calls other graphs, or something other than a tensor is taken or returned.
    """
    weights, outputs = _weights_of(program), tuple(outputs)
    needed = {each for call in calls for each in call.all_input_nodes} | set(outputs)
    inputs = tuple(node for node in program.graph.nodes if node in needed and node not in weights and node not in calls)
    if any(not isinstance(node.meta.get("val"), torch.Tensor) for node in (*inputs, *outputs)):
        raise OptimizationError("a number that follows from values is used")
    root, graph, copies = nn.Module(), Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in program.graph.nodes:
        if node in needed and node in weights:
            setattr(root, node.name, weights[node])
            copies[node] = graph.get_attr(node.name)
        elif node in calls:
            if node.op != "call_function":
                raise OptimizationError("a part of the program is a graph of its own")
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(GraphModule(root, graph), inputs, outputs)


def _weights_of(program: torch.export.ExportedProgram) -> dict[Node, Any]:
    values = {**program.state_dict, **program.constants}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in targets]
    return {node: values[targets[node.name]] for node in nodes}
