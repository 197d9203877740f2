"""Group the nodes of a graph by the memory that their values may share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from featx.ir.form import computes_form, reads_form
from featx.ir.modules import modules_of
from featx.ir.paths import attribute_at, parents_of
from featx.tree import tree_leaves

if TYPE_CHECKING:
    from featx.ir.effects import Effects
    from featx.ir.graph import Graph
    from featx.ir.node import Node


def _is_number(node: Node, numbers: Collection[Node]) -> bool:
    """Say whether a node gives the form of a tensor, or a number that Python makes of such `numbers`."""
    inputs = node.all_input_nodes
    if reads_form(node):
        return all("dtype" in source.meta for source in inputs)
    return bool(inputs) and computes_form(node) and all(source in numbers for source in inputs)


class MemoryGroups:
    """A partition of the nodes: two values that may share memory are in one group.

    Views, in-place results and whatever is not known to be fresh join the groups of their inputs, and reads of one
    attribute are one group. What a called module keeps (its parameters and buffers) is a group too, which reads of them
    belong to. Built in O(nodes + edges), practically; asked in O(1).

    Groups are numbers that are not negative; those that are joined later have one of their numbers.

    Args:
        graph: the graph.
        effects: the effects of its calls.
        copies: nodes that are known to share no memory with their inputs.
    """

    def __init__(self, graph: Graph, effects: Effects, copies: Collection[Node] = ()) -> None:
        self._graph, self._effects = graph, effects
        self._parents: list[int] = []
        self._groups: dict[Node, int] = {}
        self._external: set[int] = set()
        attributes: dict[object, int] = {}
        modules = {node.target for node in graph.nodes if node.op == "call_module"}
        self._states = {path: index for index, path in enumerate(modules)}
        self._parents.extend(self._states.values())
        for path, index in self._states.items():  # what a module inside keeps, the one around it keeps too
            for around in parents_of(path):
                if around in self._states:
                    self._join(index, self._states[around])
        numbers: set[Node] = set()
        for node in graph.nodes:
            group = len(self._parents)
            self._parents.append(group)
            self._groups[node] = group
            if node.op == "get_attr":
                self._join(group, attributes.setdefault(effects.storage_of(node), group))
                for path in parents_of(node.target):
                    if path in self._states:
                        self._join(group, self._states[path])
            if _is_number(node, numbers):
                numbers.add(node)
                continue
            for source in effects.of(node).shares if node not in copies else ():
                if source not in numbers:  # `x.expand(n, -1)` is a view of x alone
                    self._join(group, self._groups[source])
            if node.op == "call_module" and effects.of(node).returns_state:
                self._join(group, self._states[node.target])
        self._elsewhere = self._joined_state() if any(effects.of(node).writes_elsewhere for node in graph.nodes) else ()
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr") or effects.of(node).returns_state:
                self._external.add(self.of(node))

    def _joined_state(self) -> tuple[int, ...]:
        """Make one group of all that the model keeps, some of which a call writes, and return a number of it."""
        state = [*self._states.values(), *(self._groups[node] for node in self._graph.nodes if node.op == "get_attr")]
        for group in state:
            self._join(state[0], group)
        return tuple(state[:1])

    def of(self, node: Node) -> int:
        """Return the number of the group of `node`."""
        return self._find(self._groups[node])

    def state_of(self, node: Node) -> int:
        """Return the group of what the module that `node` calls keeps."""
        return self._find(self._states[node.target])

    def kept_by(self, node: Node) -> int:
        """Return the group of what a read of an attribute returns, or of what the module that `node` calls keeps."""
        return self.of(node) if node.op == "get_attr" else self.state_of(node)

    def is_external(self, node: Node) -> bool:
        """Say whether the value of `node` may share memory with an input or with the model's own tensors."""
        return self.of(node) in self._external

    def read_by(self, node: Node) -> set[int]:
        """Return the groups whose contents decide what `node` does: of its inputs, and of what it reads of a module."""
        groups = {self.of(source) for source in node.all_input_nodes}
        if node.op == "call_module":
            groups.add(self.state_of(node))
        elif node.op == "get_attr":
            groups.add(self.of(node))
        return groups

    def written_by(self, node: Node) -> set[int]:
        """Return the groups that `node` may write."""
        effects = self._effects.of(node)
        groups = {self.of(target) for target in effects.writes}
        if effects.writes_state and node.op == "call_module":
            groups.add(self.state_of(node))
        return groups.union(map(self._find, self._elsewhere)) if effects.writes_elsewhere else groups

    def written(self) -> set[int]:
        """Return the groups that any node of the graph may write. O(nodes)."""
        return {group for node in self._graph.nodes for group in self.written_by(node)}

    def changed_by(self, node: Node) -> set[int]:
        """Return the groups that `node` may write, and that of the module it calls where it leaves attributes there."""
        groups = self.written_by(node)
        return groups | {self.state_of(node)} if self._effects.of(node).leaves_attributes else groups

    def join(self, one: Node, other: Node) -> None:
        """Make one group of those of two nodes."""
        self._join(self._groups[one], self._groups[other])

    def join_shared_state(self, root: object) -> None:
        """Join what the graph reads of `root` under two paths, as far as that is one module or tensor.

        O(nodes + modules and tensors that the graph uses).
        """
        holders: dict[object, int] = {}
        done: set[tuple[str, str]] = set()
        for node in self._graph.nodes:
            if node.op not in ("call_module", "get_attr") or (node.op, node.target) in done:
                continue
            done.add((node.op, node.target))
            group = self.kept_by(node)
            for part in _held(root, node.target):
                self._join(holders.setdefault(part, group), group)

    def join_written_inputs(self, others: Iterable[Node] = ()) -> None:
        """Join the inputs of the graph where one of them, or of `others`, may be written: two may be one tensor."""
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        written = self.written().union(map(self.of, others))
        if any(self.of(node) in written for node in inputs):
            for node in inputs:
                self.join(inputs[0], node)

    def _find(self, group: int) -> int:
        parents = self._parents
        while parents[group] != group:
            parents[group] = parents[parents[group]]
            group = parents[group]
        return group

    def _join(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        if one != other:
            one, other = min(one, other), max(one, other)
            self._parents[other] = one
            if other in self._external:
                self._external.add(one)


def memory_of(tensor: torch.Tensor) -> int:
    """Return what is the same for tensors that share memory, while they live."""
    try:
        return tensor.untyped_storage()._cdata
    # Sparse tensors, those of torch.func, and parameters that are not initialized have no memory of their own.
    except (NotImplementedError, RuntimeError, ValueError):
        return id(tensor)


def overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """Say whether two of some tensors that are not one object may share memory. The gaps of their strides count too."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
            continue
        lengths = zip(tensor.shape, tensor.stride(), strict=True)
        start = int(tensor.storage_offset())
        width = 1 + sum((length - 1) * stride for length, stride in lengths)
        of_memory = spans.setdefault(memory_of(tensor), [])
        begin, end = start * tensor.itemsize, (start + width) * tensor.itemsize
        if any(begin < other_end and other_begin < end for other_begin, other_end in of_memory):
            return True
        of_memory.append((begin, end))
    return False


def _held(root: object, path: str) -> Iterator[object]:
    """Yield what stands for each module and tensor that `root` has at `path`, the same under every path to it."""
    value = attribute_at(root, path)
    if isinstance(value, nn.Module):
        for module in modules_of(value):
            yield ("module", id(module))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield ("memory", memory_of(tensor))
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield ("memory", memory_of(leaf))
