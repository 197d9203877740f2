"""What `cost` gives: the cost of each node and of each module, as dataclasses and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import torch

from featx.errors import NodeNameError
from featx.ir.paths import did_you_mean
from featx.passes.hierarchy import Hierarchy
from featx.passes.table_format import clipped, format_table, with_prefix
from featx.passes.traffic import bytes_of

_HEADINGS = ("params", "FLOPs", "elem-wise", "read", "written", "FLOP/B", "alive")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What something costs.

    Attributes:
        flops: multiplications and additions of matrix products, convolutions and attentions.
        elementwise: operations of everything else.
        bytes_read: what operators read.
        bytes_written: what operators write.
        parameters: how many numbers the parameters have that are read, each parameter once.
        parameter_bytes: the memory of those.
        allocated: the memory, in bytes, of all values that are made, inner ones too.
        peak: the memory of all values that are alive at the worst moment, inputs and weights not counted.
    """

    flops: int
    elementwise: int
    bytes_read: int
    bytes_written: int
    parameters: int
    parameter_bytes: int
    allocated: int
    peak: int

    @property
    def bytes_moved(self) -> int:
        """What operators read and write, in bytes."""
        return self.bytes_read + self.bytes_written

    @property
    def operations(self) -> int:
        """FLOPs and element-wise operations."""
        return self.flops + self.elementwise

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: operations for each byte that is moved; 0 where nothing is."""
        return self.operations / self.bytes_moved if self.bytes_moved else 0.0

    def _cells(self) -> tuple[str, ...]:
        return (
            with_prefix(self.parameters),
            with_prefix(self.flops),
            with_prefix(self.elementwise),
            with_prefix(self.bytes_read, "B"),
            with_prefix(self.bytes_written, "B"),
            f"{self.intensity:.3g}",
            with_prefix(self.peak, "B"),
        )


@dataclass(frozen=True, kw_only=True)
class NodeCost(Cost):
    """The cost of one node, named `name` in the code, which belongs to the module at `path`.

    `qualified_name` is what it can be asked for as. `operators` has how often each operator of torch ran
    (`aten::addmm`), and `unknown` those without a rule. `shape` is that of the value, where it is a tensor.
    """

    name: str
    qualified_name: str
    op: str
    target: str
    path: str
    shape: tuple[int, ...] | None
    operators: dict[str, int] = field(repr=False)
    unknown: dict[str, int] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ModuleCost(Cost):
    """The cost of all nodes of the module at `path`, of class `kind`, and of the modules inside it."""

    path: str
    kind: str
    nodes: int


@dataclass(frozen=True, kw_only=True, repr=False)
class CostReport:
    """The cost of a graph.

    Attributes:
        nodes: the nodes in their order, without inputs and output.
        modules: the modules in the order in which they first ran, before them ('' as path) the whole graph.
        weight_bytes: the memory of parameters and buffers.
        input_bytes: the memory of the inputs.
        kept_bytes: the memory that is alive at the end: outputs and, with gradients, what the backward pass needs.
    """

    nodes: tuple[NodeCost, ...]
    modules: tuple[ModuleCost, ...]
    weight_bytes: int
    input_bytes: int
    kept_bytes: int

    @property
    def total(self) -> ModuleCost:
        """The cost of the whole graph."""
        return self.modules[0]

    def __getitem__(self, path: str) -> ModuleCost:
        """Return the cost of the module at a path.

        Raises:
            NodeNameError: no module of this path has run.
        """
        found = {module.path: module for module in self.modules}
        if path not in found:
            raise NodeNameError(f"no module '{path}' has run.{did_you_mean(path, found)}", path)
        return found[path]

    @property
    def unknown(self) -> dict[str, tuple[str, ...]]:
        """The operators that have no rule, each with the names of the nodes that run it."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            for operator in node.unknown:
                found.setdefault(operator, []).append(node.name)
        return {operator: tuple(names) for operator, names in found.items()}

    def node_table(self) -> str:
        """Return a table with a row for each node."""
        rows = [
            (
                node.qualified_name,
                clipped(node.target, 40),
                "" if node.shape is None else str(node.shape),
                *node._cells(),
            )
            for node in self.nodes
        ]
        return format_table(("node", "target", "shape", *_HEADINGS), rows, text_columns=3)

    def module_table(self, depth: int | None = None) -> str:
        """Return a table with a row for each module, or only for those at most `depth` levels inside the outermost."""
        rows = [
            (
                f"{'  ' * _depth(module.path)}{module.path.rpartition('.')[2] or module.kind}",
                module.kind,
                *module._cells(),
            )
            for module in self.modules
            if depth is None or _depth(module.path) <= depth
        ]
        return format_table(("module", "class", *_HEADINGS), rows)

    def __repr__(self) -> str:
        total = self.total
        return (
            f"<CostReport of {total.kind}: {with_prefix(total.parameters)} parameters, "
            f"{with_prefix(total.flops, 'FLOPs')}, {len(self.nodes)} nodes; print it for a table>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        total = self.total
        memory = self.weight_bytes + self.input_bytes + total.peak
        lines = [
            self.module_table(depth=2),
            "",
            f"{with_prefix(total.parameters)} parameters, {with_prefix(total.flops, 'FLOPs')}, "
            f"{with_prefix(total.elementwise)} element-wise operations, {with_prefix(total.bytes_moved, 'B')} moved",
            f"memory: {with_prefix(memory, 'B')} (weights {with_prefix(self.weight_bytes, 'B')}, inputs "
            f"{with_prefix(self.input_bytes, 'B')}, other values at most {with_prefix(total.peak, 'B')})",
        ]
        for operator, nodes in self.unknown.items():
            lines.append(f"not counted: {operator.replace('::', '.')} in {clipped(', '.join(nodes), 80)}")
        return "\n".join(lines)


def sum_by_module(
    nodes: Sequence[NodeCost],
    parameters: Sequence[dict[int, torch.Tensor]],
    around: Sequence[tuple[str, ...]],
    hierarchy: Hierarchy,
) -> tuple[ModuleCost, ...]:
    """Add up nodes for each module around them. O(nodes * depth)."""
    members: dict[str, list[int]] = {"": []}
    for index, paths in enumerate(around):
        for path in paths:
            members.setdefault(path, []).append(index)
    found: list[ModuleCost] = []
    for path, indices in members.items():
        inside = [nodes[index] for index in indices]
        read: dict[int, torch.Tensor] = {}
        for index in indices:
            read.update(parameters[index])
        found.append(
            ModuleCost(
                path=path,
                kind=hierarchy.kind(path),
                nodes=len(inside),
                flops=sum(node.flops for node in inside),
                elementwise=sum(node.elementwise for node in inside),
                bytes_read=sum(node.bytes_read for node in inside),
                bytes_written=sum(node.bytes_written for node in inside),
                parameters=sum(tensor.numel() for tensor in read.values()),
                parameter_bytes=sum(map(bytes_of, read.values())),
                allocated=sum(node.allocated for node in inside),
                peak=max((node.peak for node in inside), default=0),
            )
        )
    return tuple(found)


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0
