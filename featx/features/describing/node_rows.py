"""nodes: list all values inside a model, with what a trace and a count of operations show."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from torch import nn

from featx.features.building.each_mode import in_each_mode
from featx.features.building.prune import prune
from featx.features.building.tracing import ModelTracing
from featx.features.building.tracing_options import TracingOptions
from featx.features.describing.info import infos_of
from featx.features.describing.other_sizes import OtherSizes
from featx.features.describing.table import Kind, NodeInfo, NodeTable
from featx.features.requests.attention import probabilities_beside, with_probabilities
from featx.features.requests.request import OUTPUT, PROBABILITIES
from featx.features.requests.select import names_of, select
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.ir.text import format_target
from featx.module import GraphModule
from featx.passes.cost import cost
from featx.tracing.nodes.module_output import node_that_made
from featx.tracing.replica.model_context import refuse_uninitialized

# What reads a part or a property of a value, and computes nothing.
_ACCESSES = frozenset({"getattr", "getitem", "size", "dim", "__getitem__"})


def nodes(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    tracer_kwargs: Mapping[str, Any] | None = None,
    concrete_args: dict[str, Any] | None = None,
    depth: int | None = None,
    flops: bool = True,
) -> NodeTable:
    """Return a table of all values inside `model` that can be asked for, with shapes, strides and costs.

    A replica of the model runs on tensors without values, in eval mode and, where its code asks for the mode, in train
    mode; the model is only read. FLOPs take one more run. O(nodes + modules) each.

    Args:
        model: what to look into.
        example_inputs: inputs, as for `create_feature_extractor`; by default what the model declares or its first
            layer suggests.
        tracer_kwargs: as for `get_graph_node_names`.
        concrete_args: inputs that are fixed to a value, by name.
        depth: how deep the table is printed.
        flops: count them. An operator without a rule counts none.

    Raises:
        ArgumentTypeError: `model` is not a module.
        TraceError: the model cannot be traced in either mode; the message says where and what to do.
    """
    options = TracingOptions(
        tracer_kwargs=tracer_kwargs,
        concrete_args=concrete_args,
        example_inputs=example_inputs,
        opens_operators=True,
        opens_stacks=True,
    )
    tracing = ModelTracing(model, options)
    rows, errors = in_each_mode(tracing, lambda: _rows(tracing, flops=flops))
    if not rows:
        raise errors[model.training]
    if not errors and rows[True] is rows[False]:
        rows = {False: [replace(row, mode="both") for row in rows[False]]}
    merged, missing, note = _merged(rows), tracing.inputs.missing, None
    if missing is not None and not any(row.shape or row.shapes for row in merged):
        note = f"Shapes are not known, as {missing}; give example_inputs with which it runs."
    for end in dict.fromkeys(tracing.ends.values()):
        note = end.describe(model)
    return NodeTable(merged, type(model).__name__, depth, note)


@dataclass(frozen=True)
class TracedRows:
    """The rows of a model in one mode, and where they come from.

    Attributes:
        rows: the rows, without FLOPs.
        graph: the graph of all that the model does, with marks of what modules return.
        nodes: the node of each row, by name.
        other_sizes: says which shapes the values have, by name, for inputs of other sizes; None without an example.
    """

    rows: list[NodeInfo]
    graph: Graph
    nodes: dict[str, Node]
    other_sizes: OtherSizes | None

    @cached_property
    def by_name(self) -> dict[str, NodeInfo]:
        """The rows by name."""
        return {row.name: row for row in self.rows}


def traced_rows(tracing: ModelTracing) -> TracedRows:
    """Return the rows of a model in the mode of `tracing`, whose option `opens_stacks` should be set."""
    paths = [path for path, _ in tracing.model.named_modules() if path]
    refuse_uninitialized(tracing.model)
    graph = tracing.graph([*paths, OUTPUT], keep_source=True, may_end_early=True)
    end = tracing.ends.get(tracing.training)
    unfinished = set[str]() if end is None else {end.path, *parents_of(end.path)}
    found = _nodes_by_name(graph, [path for path in paths if path not in unfinished])
    other_sizes = _other_sizes(graph, found, tracing)
    infos = infos_of(found, {name: name for name in found}, tracing.known_model, tracing.inputs.images, other_sizes)
    modules = dict(tracing.model.named_modules())
    rows = [
        NodeInfo(
            name=info.key,
            kind=_kind(node, info.key in modules),
            type=_type(node, modules.get(info.key)),
            shape=info.shape,
            dtype=info.dtype,
            layout=info.layout,
            channels=info.channels,
            stride=info.stride,
            prefix_tokens=info.prefix_tokens,
            parameters=sum(each.numel() for each in modules[info.key].parameters()) if info.key in modules else 0,
            flops=None,
            mode="train" if tracing.training else "eval",
            source=node.meta.get("source"),
            shapes=info.shapes,
        )
        for info, node in zip(infos, found.values(), strict=True)
    ]
    return TracedRows(rows, graph, found, other_sizes)


def _with_probabilities(rows: list[NodeInfo], traced: TracedRows, modules: Mapping[str, nn.Module]) -> list[NodeInfo]:
    """Return the rows and, after each of fused attention, one for the probabilities that can be asked for."""
    beside = probabilities_beside(traced.graph, traced.nodes, modules)
    by_name = {row.name: row for row in rows}
    several: list[NodeInfo] = []
    for name in with_probabilities(by_name, modules) if beside else by_name:
        if name in by_name:
            several.append(by_name[name])
        elif name in beside:
            meta = beside[name].meta
            several.append(
                replace(
                    several[-1], name=name, kind="operation", type=PROBABILITIES, shape=meta.get("shape"),
                    dtype=meta.get("dtype"), layout=None, channels=None, stride=None, prefix_tokens=0, parameters=0,
                    flops=None, shapes={},
                )
            )  # fmt: skip
    return several


def _rows(tracing: ModelTracing, *, flops: bool) -> list[NodeInfo]:
    traced = traced_rows(tracing)
    counted = _flops(traced.graph, tracing) if flops else {}
    rows = traced.rows
    if counted:
        rows = [replace(row, flops=counted.get(row.name, counted.get(traced.nodes[row.name].name, 0))) for row in rows]
    return _with_probabilities(rows, traced, dict(tracing.model.named_modules()))


def _nodes_by_name(graph: Graph, paths: Collection[str]) -> dict[str, Node]:
    """Return the nodes by the names under which they can be asked for, each module before what is inside it."""
    names = names_of(graph)
    known = set(paths)
    in_order: dict[str, str] = {}
    for name in names:
        around = [path for path in parents_of(name) if path in known]
        in_order.update({path: path for path in (*reversed(around), name) if path not in in_order})
    return select(graph, in_order, "the model")


def _kind(node: Node, is_module: bool) -> Kind:
    if is_module or node.op == "call_module":
        return "module"
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "weight"
    return "access" if _operation(node) in _ACCESSES else "operation"


def _type(node: Node, module: nn.Module | None) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input" if node.op == "placeholder" else "weight"
    if module is not None:
        return type(module).__name__
    stack = cast(dict[str, Any], node.meta.get("nn_module_stack") or {})
    if node.op == "call_module" and node.target in stack:
        return stack[str(node.target)][1].__name__
    return _operation(node)


def _operation(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target.rpartition(".")[2]
    return format_target(node.target).rpartition(".")[2]


def _other_sizes(graph: Graph, found: Mapping[str, Node], tracing: ModelTracing) -> OtherSizes | None:
    if tracing.inputs.used is None:
        return None
    model = tracing.model_in_mode()

    def small() -> Graph:
        shapes = {name: node_that_made(node).meta.get("shape") for name, node in found.items()}
        maps = {name: found[name] for name, shape in shapes.items() if len(shape or ()) >= 3}
        if maps:
            return prune(graph, maps, model)
        empty = Graph()
        empty.output({})
        return empty

    return OtherSizes(small, model, tracing.inputs.used, tracing.inputs.image)


def _flops(graph: Graph, tracing: ModelTracing) -> dict[str, int]:
    """Return the FLOPs of modules by path, and of nodes by name; nothing where the graph cannot be run again.

    A list of modules that is not called itself has those of all that is inside it.
    """
    example = tracing.inputs.used
    if example is None:
        return {}
    inputs = example.without_values()
    copy = Graph()
    copy.graph_copy(graph, {})
    _drop_guards(copy)
    copy.output(None)
    try:
        report = cost(GraphModule(tracing.model_in_mode(), copy), *inputs.args, unknown="list", **inputs.kwargs)
    except Exception:  # whatever a model does that cannot be run without values
        return {}
    found = {row.name: row.flops for row in report.nodes}
    of_modules = {row.path: row.flops for row in report.modules if row.path}
    inside: dict[str, int] = {}
    for path, flops in of_modules.items():
        for around in itertools.takewhile(lambda parent: parent not in of_modules, parents_of(path)):
            inside[around] = inside.get(around, 0) + flops
    return {**inside, **found, **of_modules}


def _drop_guards(graph: Graph) -> None:
    """Erase guards, and what is asked for them alone: answers need values. O(nodes)."""
    for node in reversed(list(graph.nodes)):
        if node.meta.get("is_guard") or not (node.users or node.op == "placeholder" or "qualified_name" in node.meta):
            graph.erase_node(node)


def _merged(rows: Mapping[bool, list[NodeInfo]]) -> list[NodeInfo]:
    """Return the rows of eval mode and, after the row that they follow, those that train mode alone has."""
    if len(rows) == 1:
        return next(iter(rows.values()))
    in_eval = {row.name for row in rows[False]}
    in_train = {row.name for row in rows[True]}
    behind: dict[str | None, list[NodeInfo]] = {}
    last: str | None = None
    for row in rows[True]:
        if row.name in in_eval:
            last = row.name
        else:
            behind.setdefault(last, []).append(row)
    merged = behind.get(None, [])
    for row in rows[False]:
        merged.append(replace(row, mode="both" if row.name in in_train else "eval"))
        merged += behind.get(row.name, [])
    return merged
