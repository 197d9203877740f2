"""Split a graph by what a backend supports, or by tags on its nodes, with the surface of torch.fx's tools."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from featx.errors import PassError
from featx.ir.node import Node
from featx.migration.operator_support import CALLABLE_NODE_OPS, OperatorSupportBase, get_node_target
from featx.module import GraphModule
from featx.passes.accesses import Accesses
from featx.passes.partition import supported_groups
from featx.passes.submodules import ChildForm, Regrouping


class Partition:
    """Nodes that are to become one submodule; `nodes` maps them to their orders, numbers that nothing here reads."""

    def __init__(
        self,
        id: int | None = None,
        nodes: Iterable[Node] | None = None,
        node_orders: Iterable[int] | None = None,
    ) -> None:
        self.id = id
        self.nodes: dict[Node, int | None] = dict(zip(nodes or (), node_orders or itertools.repeat(None), strict=False))

    def add_node(self, node: Node, node_order: int | None = None) -> None:
        """Add a node."""
        self.nodes[node] = node_order

    def remove_node(self, node: Node) -> None:
        """Take a node away."""
        del self.nodes[node]

    def size(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes)


class CapabilityBasedPartitioner:
    """Gathers the nodes that a backend supports into submodules; see `featx.passes.partition`.

    Args:
        graph_module: the module; it is not changed.
        operator_support: says which nodes are supported.
        allows_single_node_partition: whether a partition may consist of one call.
        non_compute_ops: names of targets, as `get_node_target` gives them, that do not count as calls.
        allowed_single_node_partition_ops: names of targets that may be a partition alone.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
    ) -> None:
        self.graph_module = graph_module
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = frozenset(non_compute_ops or ())
        self.allowed_single_node_partition_ops = frozenset(allowed_single_node_partition_ops or ())

    def propose_partitions(self) -> list[Partition]:
        """Return the partitions, in the order in which they run. O(nodes * log(nodes) + edges)."""
        gm = self.graph_module
        modules = dict(gm.named_modules())
        groups = supported_groups(gm, lambda node: self.operator_support.is_node_supported(modules, node), Accesses(gm))
        kept = [group for group in groups if self._is_large_enough(group, modules)]
        return [Partition(number, group) for number, group in enumerate(kept)]

    def _is_large_enough(self, group: list[Node], modules: Mapping[str, nn.Module]) -> bool:
        targets = [get_node_target(modules, node) for node in group if node.op in CALLABLE_NODE_OPS]
        counted = [target for target in targets if target not in self.non_compute_ops]
        if len(counted) > 1 or (len(counted) == 1 and self.allows_single_node_partition):
            return True
        return len(counted) == 1 and counted[0] in self.allowed_single_node_partition_ops

    def fuse_partitions(self, partitions: Iterable[Partition], prefix: str = "fused_") -> GraphModule:
        """Return a new module with the children `fused_0`, `fused_1`... for the partitions.

        Raises:
            PassError: two partitions need each other.
        """
        names = {node: f"{prefix}{number}" for number, part in enumerate(partitions) for node in part.nodes}
        gm = self.graph_module
        return Regrouping(gm, names, Accesses(gm), ChildForm(sets_modes=False)).build()

    def partition_and_fuse(self, prefix: str = "fused_") -> GraphModule:
        """Return a new module with a child for each partition that `propose_partitions` gives."""
        return self.fuse_partitions(self.propose_partitions(), prefix)


def split_by_tags(
    gm: GraphModule, tags: Sequence[str], return_fqn_mapping: bool = False, return_tuple: bool = False
) -> Any:  # Any: what it returns depends on an argument, and the callers of torch.fx's know which it is
    """Return a module with a child for each of `tags`, which holds the nodes whose attribute `tag` is that.

    With `return_fqn_mapping` also the new path for each path in `gm` of a module that is called; with `return_tuple`
    children return tuples of one value too. `gm` is not changed. O(nodes + edges).

    Raises:
        PassError: a call has no tag, or none of `tags`; or two parts need each other.
    """
    names: dict[Node, str] = {}
    known = set(tags)
    for node in gm.graph.nodes:
        if node.op in CALLABLE_NODE_OPS:
            tag: Any = getattr(node, "tag", None)
            if tag not in known:
                raise PassError(f"node '{node.name}' has the tag {tag!r}; expected one of {', '.join(tags)}")
            names[node] = tag
    split = Regrouping(gm, names, Accesses(gm), ChildForm(sets_modes=True, returns_tuple=return_tuple)).build()
    if not return_fqn_mapping:
        return split
    return split, {node.target: f"{tag}.{node.target}" for node, tag in names.items() if node.op == "call_module"}


def getattr_recursive(obj: Any, name: str) -> Any:
    """Return the attribute at a dotted path, None where there is none."""
    for part in name.split("."):
        obj = getattr(obj, part, None)
    return obj


def setattr_recursive(obj: Any, attr: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    owner, _, name = attr.rpartition(".")
    setattr(getattr_recursive(obj, owner) if owner else obj, name, value)


def replace_target_nodes_with(
    fx_module: GraphModule, old_op: str, old_target: Any, new_op: str, new_target: Any
) -> None:
    """Let every node with this opcode and target have another opcode and target; arguments and names stay."""
    for node in fx_module.graph.nodes:
        if node.op == old_op and node.target == old_target:
            node.op, node.target = new_op, new_target
