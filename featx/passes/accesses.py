"""What memory the nodes of a graph read and write, so that passes can tell what must keep its order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from featx.ir.effects import Effects
from featx.ir.memory import MemoryGroups
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.ir.repeatable import RepeatableCalls, depends_on_mode, is_known_module, may_draw
from featx.module import GraphModule

# Cells that are no memory: the generators of random numbers, and modes such as autocast.
DRAWS, MODES = -1, -2


class Accesses:
    """Which cells each node of `gm` reads and writes, as its graph is now.

    A cell is memory that values may share: groups of `MemoryGroups`, joined where modules hold one tensor under two
    paths. Two inputs may be one tensor, so they are one cell as soon as one of them is written; that an input is a
    tensor of the model is not expected. Make a new object after editing. O(nodes + edges + tensors of the modules).
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        graph = gm.graph
        self.effects = Effects(graph, gm)
        self.repeatable = RepeatableCalls(self.effects)
        self._memory = MemoryGroups(graph, self.effects)
        self._memory.join_shared_state(gm)
        self._memory.join_written_inputs()
        self._known: dict[str, bool] = {}
        # The cells of what the model keeps.
        self.state = {self.cell_of(node) for node in graph.nodes if node.op == "get_attr"}
        self.state |= {self.state_of(node) for node in graph.nodes if node.op == "call_module"}
        self._written = {cell for node in graph.nodes for cell in self.writes(node)}
        self._written_in_other_mode = {cell for node in graph.nodes for cell in self.writes_in_other_mode(node)}
        # Modules that may assign their attributes anew.
        self._assigning = {
            node.target: self.state_of(node)
            for node in graph.nodes
            if node.op == "call_module" and self.effects.of(node).writes_state and not self._is_known(node)
        }
        self._assigned = set(self._assigning.values())

    def cell_of(self, node: Node) -> int:
        """Return the cell of the value of `node`."""
        return self._memory.of(node)

    def state_of(self, node: Node) -> int:
        """Return the cell of what the module that `node` calls keeps."""
        return self._memory.state_of(node)

    def is_written(self, node: Node) -> bool:
        """Say whether any node writes the memory of the value of `node`, before it or after it."""
        return self.cell_of(node) in self._written

    def is_written_in_other_mode(self, node: Node) -> bool:
        """Say whether any node writes that memory in train or eval mode, whichever `gm` is not in."""
        return self.cell_of(node) in self._written_in_other_mode

    def is_state_written(self, node: Node) -> bool:
        """Say whether any node writes what the module that `node` calls keeps."""
        return self.state_of(node) in self._written

    def is_fixed_read(self, node: Node) -> bool:
        """Say whether `node` reads an attribute that is the same object during the whole run."""
        return node.op == "get_attr" and self.cell_of(node) not in self._assigned

    def sets_seed(self, node: Node) -> bool:
        """Say whether `node` is `torch.manual_seed` or a function of that name for another generator."""
        is_switch = self.effects.of(node).changes_global_state
        return is_switch and getattr(node.target, "__name__", None) == "manual_seed"

    def share_assigning_modules(self, module: GraphModule) -> None:
        """Let `module`, which shares what `gm` has, read attributes that a module assigns anew from that module itself.

        It would have their present values otherwise.
        """
        for node in module.graph.find_nodes(op="get_attr") if self._assigning else ():
            for path in (*reversed(parents_of(node.target)), node.target):
                if path in self._assigning:
                    module.add_submodule(path, self._gm.get_submodule(path))

    def reads(self, node: Node) -> set[int]:
        """Return the cells whose contents decide what `node` does."""
        return self._memory.read_by(node)

    def writes(self, node: Node) -> set[int]:
        """Return the cells that `node` may change; what it draws and switches are cells too."""
        effects = self.effects.of(node)
        cells = self._memory.written_by(node)
        if effects.is_random:
            cells.add(DRAWS)
        if effects.changes_global_state:
            cells |= {MODES, DRAWS}  # a seed is set for good
        return cells

    def writes_in_other_mode(self, node: Node) -> set[int]:
        """Return the cells that `node` may change besides, if its module is put into the other one of train and eval.

        For an unknown module also those that it was not seen to change on the example.
        """
        module = self.effects.module_of(node) if node.op == "call_module" else None
        if module is None:
            return set()
        is_unknown = not self._is_known(node)
        cells = {DRAWS} if is_unknown or may_draw(module) else set[int]()
        return cells | {self.state_of(node)} if is_unknown or depends_on_mode(module) else cells

    def dependencies(self, nodes: Iterable[Node], *, in_modes: bool) -> Iterator[tuple[Node, Node]]:
        """Yield pairs of `nodes` of which the first must run before the second, enough to imply all such pairs.

        A pair has a value that the second reads, or a cell that one of them writes, in train mode or in eval mode; with
        `in_modes` every node must also stay between the same switches. A check may come later than a write after it.
        O(nodes + edges).
        """
        chosen = set(nodes)
        writers: dict[int, Node] = {}
        readers: dict[int, list[Node]] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if source in chosen:
                    yield source, node
            reads, writes = self.reads(node), self.writes(node) | self.writes_in_other_mode(node)
            for cell in reads | {MODES} if in_modes else reads:
                if cell in writers:
                    yield writers[cell], node
                readers.setdefault(cell, []).append(node)
            for cell in writes:
                if writers.get(cell, node) is not node:
                    yield writers[cell], node
                for reader in readers.pop(cell, ()):
                    if reader is not node:
                        yield reader, node
                writers[cell] = node

    def _is_known(self, node: Node) -> bool:
        known = self._known.get(node.target)
        if known is None:
            module = self.effects.module_of(node)
            known = self._known[node.target] = module is not None and is_known_module(module)
        return known
