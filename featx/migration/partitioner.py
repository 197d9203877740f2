"""Gather the nodes that a backend supports into partitions, with the surface and the choices of torch.fx's tool."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from featx.errors import PassError
from featx.ir.node import Node
from featx.migration.merging import PartitionMerger
from featx.migration.operator_support import CALLABLE_NODE_OPS, OperatorSupportBase, target_name
from featx.module import GraphModule
from featx.passes.accesses import Accesses
from featx.passes.submodules import ChildForm, Regrouping

# What never counts as a call that a partition is worth making for.
_COMPUTES_NOTHING = frozenset({"torch.ops.aten.view", "_operator.getitem"})


class Partition:
    """Nodes that are to become one submodule; `nodes` maps them to their places, counted from the end of the graph.

    Raises:
        PassError: there are not as many orders as nodes.
    """

    def __init__(
        self,
        id: int | None = None,
        nodes: Iterable[Node] | None = None,
        node_orders: Iterable[int] | None = None,
    ) -> None:
        self.id = id
        members = list(nodes or ())
        orders: list[int | None] = [None] * len(members) if node_orders is None else list(node_orders)
        if len(orders) != len(members):
            raise PassError(f"a partition of {len(members)} nodes got {len(orders)} node_orders; give one for each")
        self.nodes: dict[Node, int | None] = dict(zip(members, orders, strict=True))

    def __repr__(self) -> str:
        return str(self.nodes)

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
    """Gathers the nodes that a backend supports into submodules; `featx.passes.partition` makes as few as can be.

    Args:
        graph_module: the module; it is not changed.
        operator_support: says which calls are supported; inputs, outputs and reads of attributes are not asked about.
        allows_single_node_partition: whether a partition may have less than two functions that compute something.
        non_compute_ops: names of functions that compute nothing.
        allowed_single_node_partition_ops: names of functions that may be a partition alone.
        skip_horizontal_fusion: gather only calls that read each other's values.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        self.graph_module = graph_module
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = list(non_compute_ops or ())
        self.allowed_single_node_partition_ops = list(allowed_single_node_partition_ops or ())
        self.skip_horizontal_fusion = skip_horizontal_fusion

    def propose_partitions(self) -> list[Partition]:
        """Return the partitions in torch.fx's order, that of their last nodes from the end of the graph.

        As there, a call joins the partitions made so far in the order in which they were made, as far as that makes no
        cycle; writes, random draws and modes count as dependencies here. O(nodes * partitions * nodes / 64) as a rule.
        """
        gm = self.graph_module
        modules: Mapping[str, nn.Module] = dict(gm.named_modules())
        accesses = Accesses(gm)
        merger = PartitionMerger(gm, accesses)
        for node in reversed(list(gm.graph.nodes)):
            is_call = node.op in CALLABLE_NODE_OPS and not accesses.effects.of(node).changes_global_state
            number = None
            if is_call and self.operator_support.is_node_supported(modules, node):
                number = merger.add(node)
                if self.skip_horizontal_fusion:
                    merger.join_with_users(number)
            if not self.skip_horizontal_fusion:
                merger.join_all(number)
        place = {node: order for order, node in enumerate(reversed(list(gm.graph.nodes)))}
        partitions: dict[int, Partition] = {}
        for number, nodes in merger.partitions().items():
            ordered = sorted(nodes, key=place.__getitem__, reverse=True)
            partitions[number] = Partition(number, ordered, [place[node] for node in ordered])
        _move_items(gm, partitions)
        return [
            part
            for part in partitions.values()
            if part.nodes and (self.allows_single_node_partition or self._computes_enough(part.nodes))
        ]

    def _computes_enough(self, nodes: Iterable[Node]) -> bool:
        names = [target_name(node.target) for node in nodes if node.op == "call_function"]
        skipped = _COMPUTES_NOTHING.union(self.non_compute_ops)
        count = sum(name not in skipped for name in names)
        return count + sum(name in self.allowed_single_node_partition_ops for name in names) > 1

    def remove_bookend_non_compute_ops(self, partitions: list[Partition]) -> None:
        """Take calls of `non_compute_ops` that start or end a partition out of it; the partitions are changed."""
        for part in partitions:
            movable = [node for node in part.nodes if self._computes_nothing(node)]
            at_end: set[Node] = set()
            for node in reversed(movable):
                if all(user not in part.nodes or user in at_end for user in node.users):
                    at_end.add(node)
            removed: set[Node] = set()
            for node in movable:
                is_start = all(source not in part.nodes or source in removed for source in node.all_input_nodes)
                if is_start or node in at_end:
                    removed.add(node)
            for node in removed:
                part.remove_node(node)

    def _computes_nothing(self, node: Node) -> bool:
        return node.op == "call_function" and target_name(node.target) in self.non_compute_ops

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


def _move_items(gm: GraphModule, partitions: dict[int, Partition]) -> None:
    """Let each item of a value that nothing else reads be where the value is, in a partition or in none."""
    number_of = {node: number for number, part in partitions.items() for node in part.nodes}
    moves: dict[Node, int | None] = {}
    while True:
        for node in gm.graph.nodes:
            if all(user.op == "call_function" and user.target is operator.getitem for user in node.users):
                number = number_of.get(node)
                moves.update({user: number for user in node.users if number_of.get(user) != number})
        if not moves:
            return
        for node, number in moves.items():
            before = number_of.pop(node, None)
            if before is not None:
                partitions[before].remove_node(node)
            if number is not None:
                number_of[node] = number
                partitions[number].add_node(node)
        moves = {}  # items of items follow
