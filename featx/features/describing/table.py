"""nodes: a table of all values inside a model, to choose from before anything is extracted."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast, overload

import torch
from torch import nn

from featx.errors import ArgumentTypeError, NodeNameError
from featx.features.building.prune import prune
from featx.features.building.tracing import ModelTracing
from featx.features.describing.images import shapes_of_wider_image
from featx.features.describing.info import infos_of
from featx.features.describing.table_text import HINT, html_of, rich_table_of, text_of
from featx.features.requests.attention import PROBABILITIES, probabilities_beside, with_probabilities
from featx.features.requests.request import OUTPUT, expression_of
from featx.features.requests.select import names_of, select
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.text import format_target
from featx.module import GraphModule
from featx.passes.cost import cost
from featx.tracing.replica.mode_reads import ModeReads

Kind = Literal["input", "module", "operation", "access", "weight"]
Mode = Literal["both", "train", "eval"]
# What reads a part or a property of a value, and computes nothing.
_ACCESSES = frozenset({"getattr", "getitem", "size", "dim", "__getitem__"})


@dataclass(frozen=True)
class NodeInfo:
    """One value inside a model, as a row of `NodeTable`.

    Attributes:
        name: under which it can be asked for.
        kind: "module" is what a module returns; "operation" what a function or method computes outside of torch's own
            layers; "access" reads a part or a property of a value; "input" and "weight" are not computed.
        type: the class of the module or the name of the operation; "input" or "weight" for what is neither.
        shape: its shape on the example; None for what is no tensor.
        shapes: the shapes of the tensors inside what is no tensor, as in `FeatureInfo`.
        dtype: its dtype.
        layout: the meaning of its dimensions, as in `FeatureInfo`.
        channels: the size of C.
        stride: by how many pixels of the input two neighbours are apart.
        prefix_tokens: how many tokens of L stand for no patch of the image.
        parameters: how many numbers the parameters of a module have, those inside it too; each counts once.
        flops: multiplications and additions on the way through it, as `cost` counts them; None where they were not
            counted.
        mode: the modes of the model in which it exists.
        source: file and line of the model that computed it.
    """

    name: str
    kind: Kind
    type: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    layout: str | None
    channels: int | None
    stride: float | tuple[float, ...] | None
    prefix_tokens: int
    parameters: int
    flops: int | None
    mode: Mode
    source: str | None
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def depth(self) -> int:
        """How many parts its name has."""
        return self.name.count(".") + 1


class NodeTable(Sequence[NodeInfo]):
    """Values inside a model, in the order in which they are computed; a module stands ahead of what is inside it.

    It prints the outputs of modules, folded to a depth at which they fit on a screen. `filter` selects rows, and
    `names` gives what `create_feature_extractor` takes.
    """

    def __init__(self, rows: Iterable[NodeInfo], model: str, depth: int | None = None) -> None:
        self._rows = tuple(rows)
        self._model = model
        self._depth = depth

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[NodeInfo]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int | str) -> NodeInfo: ...
    @overload
    def __getitem__(self, index: slice) -> NodeTable: ...
    def __getitem__(self, index: int | str | slice) -> NodeInfo | NodeTable:
        """Return a row by its number or name, or a part of the table.

        Raises:
            NodeNameError: there is no row of this name.
        """
        if isinstance(index, str):
            row = next((row for row in self._rows if row.name == index), None)
            if row is None:
                raise NodeNameError(f"the table has no node '{index}'; table.names has those that it has")
            return row
        return NodeTable(self._rows[index], self._model, self._depth) if isinstance(index, slice) else self._rows[index]

    @property
    def names(self) -> list[str]:
        """The names of the rows."""
        return [row.name for row in self._rows]

    def filter(
        self,
        match: str | None = None,
        *,
        type: str | type[nn.Module] | None = None,
        kind: Kind | Collection[Kind] | None = None,
        stride: float | None = None,
        shape: Sequence[int | None] | None = None,
        layout: str | None = None,
        depth: int | None = None,
    ) -> NodeTable:
        """Return the rows for which all of this holds. O(rows).

        Args:
            match: a pattern of names, as in requests: `"blocks.*"`, `"layer[34].**"`.
            type: the class of a module or its name, or the name of an operation; `"*Norm*"` is a pattern.
            kind: one of the kinds of `NodeInfo`, or several.
            stride: of this stride.
            shape: of this shape; None stands for any length.
            layout: of this layout.
            depth: with at most so many parts of the name.

        Raises:
            ArgumentTypeError: a kind is unknown.
        """
        kinds = {kind} if isinstance(kind, str) else None if kind is None else set(kind)
        known: set[str] = {"input", "module", "operation", "access", "weight"}
        if kinds is not None and not kinds <= known:
            raise ArgumentTypeError(f"kind may be {', '.join(sorted(known))}, got {kind!r}")
        pattern = None if match is None else expression_of(match)
        wanted_type = type if isinstance(type, str) or type is None else type.__name__

        def holds(row: NodeInfo) -> bool:
            return (
                (pattern is None or pattern.fullmatch(row.name) is not None)
                and (wanted_type is None or fnmatch.fnmatchcase(row.type, wanted_type))
                and (kinds is None or row.kind in kinds)
                and (stride is None or row.stride == stride)
                and (shape is None or _is_of_shape(row.shape, shape))
                and (layout is None or row.layout == layout)
                and (depth is None or row.depth <= depth)
            )

        return NodeTable(filter(holds, self._rows), self._model, self._depth)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict for each row, of texts, numbers and lists alone: what `json` and data frames take."""
        return [
            {
                **vars(row),
                "shape": None if row.shape is None else list(row.shape),
                "shapes": {path: list(shape) for path, shape in row.shapes.items()},
                "dtype": None if row.dtype is None else str(row.dtype).removeprefix("torch."),
            }
            for row in self._rows
        ]

    def to_text(self, depth: int | None = None, *, everything: bool = False, hint: str = HINT) -> str:
        """Return the table as text.

        Args:
            depth: fold modules that lie deeper; by default as deep as forty rows go.
            everything: operations, accesses and weights too.
            hint: how to see the rows that are left out.
        """
        return text_of(self._rows, self._model, depth or self._depth, everything=everything, hint=hint)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_of(self._rows, self._model)

    def __rich__(self) -> Any:
        return rich_table_of(self._rows, self._model, self._depth)


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
    tracing = ModelTracing(model, tracer_kwargs, concrete_args, example_inputs)
    rows, errors = _in_each_mode(tracing, flops=flops)
    if not rows:
        raise errors[model.training]
    return NodeTable(_merged(rows), type(model).__name__, depth)


@dataclass(frozen=True)
class TracedRows:
    """The rows of a model in one mode, and where they come from.

    Attributes:
        rows: the rows, without FLOPs.
        graph: the graph of all that the model does, with marks of what modules return.
        nodes: the node of each row, by name.
        wider: says which shapes the values have, by name, for an image of twice the width; nothing where the model
            does not take one.
    """

    rows: list[NodeInfo]
    graph: Graph
    nodes: dict[str, Node]
    wider: Callable[[], Mapping[str, tuple[int, ...]]]

    @cached_property
    def by_name(self) -> dict[str, NodeInfo]:
        """The rows by name."""
        return {row.name: row for row in self.rows}


def traced_rows(tracing: ModelTracing) -> TracedRows:
    """Return the rows of a model in the mode of `tracing`."""
    paths = [path for path, _ in tracing.model.named_modules() if path]
    graph = tracing.graph([*paths, OUTPUT], keep_source=True)
    found = _nodes_by_name(graph, paths)
    wider = _wider(graph, found, tracing)
    infos = infos_of(found, {name: name for name in found}, tracing.model, tracing.image, wider)
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
    return TracedRows(rows, graph, found, wider)


def _with_probabilities(rows: list[NodeInfo], traced: TracedRows, modules: Mapping[str, nn.Module]) -> list[NodeInfo]:
    """Return the rows and, behind each of fused attention, one for the probabilities that can be asked for."""
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


def _in_each_mode(tracing: ModelTracing, *, flops: bool) -> tuple[dict[bool, list[NodeInfo]], dict[bool, Exception]]:
    rows: dict[bool, list[NodeInfo]] = {}
    errors: dict[bool, Exception] = {}
    tracing.training, tracing.reads = False, (reads := ModeReads())
    with suppress(Exception):  # without an attribute `training`, which a second attempt has
        rows[False] = _rows(tracing, flops=flops)
    tracing.reads = None
    if rows and not reads.any and not tracing.is_example_for_one_mode:
        return {False: [replace(row, mode="both") for row in rows[False]]}, {}
    for training in (False, True):
        if training in rows:
            continue
        tracing.training = training
        try:
            rows[training] = _rows(tracing, flops=flops)
        except Exception as error:  # the model's own too: a batch of one sample, targets that are missing
            errors[training] = error
    return rows, errors


def _rows(tracing: ModelTracing, *, flops: bool) -> list[NodeInfo]:
    traced = traced_rows(tracing)
    counted = _flops(traced.graph, tracing) if flops else {}
    rows = traced.rows
    if counted:
        rows = [replace(row, flops=counted.get(row.name, counted.get(traced.nodes[row.name].name, 0))) for row in rows]
    return _with_probabilities(rows, traced, dict(tracing.model.named_modules()))


def _nodes_by_name(graph: Graph, paths: Collection[str]) -> dict[str, Node]:
    """Return the nodes by the names under which they can be asked for, each module ahead of what is inside it."""
    names = names_of(graph)
    known = set(paths)
    in_order: dict[str, str] = {}
    for name in names:
        end = name.find(".")
        while end > 0:
            if name[:end] in known:
                in_order.setdefault(name[:end], name[:end])
            end = name.find(".", end + 1)
        in_order.setdefault(name, name)
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


def _wider(graph: Graph, found: Mapping[str, Node], tracing: ModelTracing) -> Any:
    image, example = tracing.image, tracing.example
    if image is None or example is None:
        return dict
    model = tracing.model_in_mode()

    def shapes() -> Mapping[str, tuple[int, ...]]:
        maps = {name: node for name, node in found.items() if len(node.meta.get("shape") or ()) >= 3}
        return shapes_of_wider_image(prune(graph, maps, model), model, example, image)()

    known: list[Mapping[str, tuple[int, ...]]] = []

    def once() -> Mapping[str, tuple[int, ...]]:
        if not known:
            known.append(shapes())
        return known[0]

    return once


def _flops(graph: Graph, tracing: ModelTracing) -> dict[str, int]:
    """Return the FLOPs of modules by path, and of nodes by name; nothing where the graph cannot be run again."""
    example = tracing.example
    if example is None:
        return {}
    inputs = example.without_values()
    copy = Graph()
    copy.graph_copy(graph, {})
    copy.output(None)
    try:
        report = cost(GraphModule(tracing.model_in_mode(), copy), *inputs.args, unknown="list", **inputs.kwargs)
    except Exception:  # whatever a model does that cannot be run without values
        return {}
    found = {row.name: row.flops for row in report.nodes}
    found.update({row.path: row.flops for row in report.modules if row.path})
    return found


def _merged(rows: Mapping[bool, list[NodeInfo]]) -> list[NodeInfo]:
    """Return the rows of eval mode and, behind the row that they follow, those that train mode alone has."""
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


def _is_of_shape(shape: tuple[int, ...] | None, wanted: Sequence[int | None]) -> bool:
    if shape is None or len(shape) != len(wanted):
        return False
    return all(length is None or length == size for size, length in zip(shape, wanted, strict=True))
