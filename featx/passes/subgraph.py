"""Cut a graph module out of another one that starts and ends at any nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from featx.errors import PassError
from featx.ir.form import computes_form
from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import DRAWS, Accesses
from featx.passes.lookup import find_nodes, quoted
from featx.passes.modes import Modes
from featx.passes.partial_copy import PartialCopy
from featx.tree import clone_tensors


def extract_subgraph(
    gm: GraphModule, inputs: str | Node | Iterable[str | Node], outputs: str | Node | Iterable[str | Node]
) -> GraphModule:
    """Return a module that computes `outputs`, given the values of `inputs`.

    Nodes are named by themselves, by their names, or by the path of a module, which means the last node in it. The
    module takes one positional argument for each input, and returns a tuple, or one value if `outputs` is one node and
    not a list. Values are as they were when `gm` computed them: one that is overwritten after that is cloned. An input
    of `gm` that has a default, and that the outputs need and that is not given, follows with that default.

    What the outputs need and the inputs give is kept, writes into its memory and guards included. Random draws that
    no output needs are left out, and so are guards of values that are not given. `gm` is not changed; submodules and
    tensors are shared. O(nodes + edges).

    Raises:
        NodeNameError: `gm` has no such node.
        PassError: the outputs need more than the inputs, an input is named twice, or an input shares memory that is
            written with another one or with what is computed.
    """
    given, wanted = find_nodes(check_graph_module(gm), inputs), find_nodes(gm, outputs)
    twice = next((node.name for node in given if given.count(node) > 1), None) if len(set(given)) < len(given) else None
    if twice is not None or not wanted:
        raise PassError(f"input '{twice}' is named twice" if wanted else "extract_subgraph needs at least one output")
    is_single = isinstance(outputs, (str, Node))
    cut = _Cut(gm, given, wanted)
    copy = PartialCopy(gm.graph, Modes(gm.graph, cut.accesses))
    for node in given:
        copy.add_input(node, node.name)
    results: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node in cut.kept:
            copy.add(node)
        if node in cut.overwritten:
            results[node] = copy.graph.call_function(clone_tensors, (copy.of(node),), name=f"{node.name}_clone")
    values = [results.get(node, copy.of(node)) for node in wanted]
    graph = copy.finish(())
    graph.output_node().args = (values[0],) if is_single else (tuple(values),)
    module = GraphModule(gm, graph, gm._get_name())
    cut.accesses.share_assigning_modules(module)
    return module


class _Cut:
    """What must run to get from the given values to the wanted ones: `kept`, without the given nodes.

    `overwritten` are the wanted nodes whose memory is written after them.
    """

    def __init__(self, gm: GraphModule, given: list[Node], wanted: list[Node]) -> None:
        self.accesses = Accesses(gm)
        self.kept: set[Node] = set()
        self._nodes = list(gm.graph.nodes)
        self._given = set(given)
        self._wanted = set(wanted)
        self._writers: dict[int, list[Node]] = {}
        for node in self._nodes:
            for cell in self.accesses.writes(node):
                self._writers.setdefault(cell, []).append(node)
        # Where the given value of a cell stands: what is written before that is in it.
        self._starts: dict[int, int] = {}
        for node in sorted(given):
            self._starts.setdefault(self.accesses.cell_of(node), node.label)
        # How many writers of a cell have been looked at; what cells are read by what runs.
        self._asked: dict[int, int] = {}
        self._read: dict[int, None] = {}
        self._needed_by: dict[Node, Node] = {}
        self._available = self._find_available()
        self._is_seeded = any(self.accesses.sets_seed(node) for node in self._nodes)
        self._need(wanted)
        self._need(self._checks())
        self._need_state_writers()
        self._refuse_shared_memory()
        self.overwritten = self._find_overwritten()

    # -- what must run -----------------------------------------------------------------------------------------------

    def _need(self, nodes: Iterable[Node]) -> None:
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in self.kept or node in self._given:
                continue
            if node.op == "placeholder" and not node.args:
                raise self._missing_error(node)
            self.kept.add(node)
            for other in (*node.all_input_nodes, *self._writers_for(node)):
                self._needed_by.setdefault(other, node)
                pending.append(other)

    def _writers_for(self, reader: Node) -> Iterator[Node]:
        """Yield what writes the memory that `reader` reads, before it."""
        cells = self.accesses.reads(reader)
        if self._is_seeded and self.accesses.effects.of(reader).is_random:
            cells.add(DRAWS)
        for cell in cells:
            self._read[cell] = None
            writers = self._writers.get(cell, ())
            start = self._starts.get(cell, -math.inf)
            done = self._asked.get(cell, 0)
            while done < len(writers) and writers[done] < reader:
                writer = writers[done]
                if writer.label > start:
                    if writer in self._given and self.accesses.cell_of(writer) != cell:
                        raise PassError(
                            f"{quoted(reader)} reads memory that {quoted(writer)} writes besides computing its value; "
                            f"'{writer.name}' cannot be an input, because then it does not run"
                        )
                    yield writer
                done += 1
            self._asked[cell] = done

    def _need_state_writers(self) -> None:
        """Need what writes state of the model that is read, also after the reader: the next call sees it."""
        state = self.accesses.state
        done = 0
        while done < len(self._read):
            cells = [cell for cell in itertools.islice(self._read, done, None) if cell in state]
            done = len(self._read)
            self._need(node for cell in cells for node in self._writers.get(cell, ()) if self._can_run(cell, node))

    def _can_run(self, cell: int, writer: Node) -> bool:
        return writer in self._available and writer.label > self._starts.get(cell, -math.inf)

    def _find_available(self) -> set[Node]:
        """Return the nodes that can be computed from the given ones."""
        available: set[Node] = set()
        lost: set[int] = set()
        for node in self._nodes:
            if node in self._given:
                available.add(node)
                lost.update(self.accesses.writes(node))
                lost.discard(self.accesses.cell_of(node))
            elif (
                (node.op != "placeholder" or node.args)
                and available.issuperset(node.all_input_nodes)
                and lost.isdisjoint(self.accesses.reads(node))
            ):
                available.add(node)
            else:
                lost.update(self.accesses.writes(node))
        return available

    def _checks(self) -> Iterator[Node]:
        """Yield the checks before the last wanted node that can be made without running more than they ask for."""
        end = max(self._wanted)
        computable, formal = set(self._given | self.kept), set(self._given | self.kept)
        for node in self._nodes:
            inputs = node.all_input_nodes
            if node < end and self.accesses.effects.of(node).is_check and node in self._available:
                if (computable if node.meta.get("is_guard") else formal).issuperset(inputs):
                    yield node
            elif node in self._available and self.accesses.repeatable.has(node):
                if computable.issuperset(inputs):
                    computable.add(node)
                if computes_form(node) and formal.issuperset(inputs):
                    formal.add(node)

    # -- what cannot be ----------------------------------------------------------------------------------------------

    def _missing_error(self, placeholder: Node) -> PassError:
        way = [placeholder]
        while way[-1] not in self._wanted:
            way.append(self._needed_by[way[-1]])
        names = [f"'{node.name}'" for node in reversed(way)]
        path = " <- ".join(names if len(names) < 8 else [*names[:3], "...", *names[-3:]])
        return PassError(
            f"{quoted(way[-1])} cannot be computed from the given inputs: it also needs '{placeholder.name}' "
            f"({path}). Add '{placeholder.name}', or a node on that way, to inputs."
        )

    def _refuse_shared_memory(self) -> None:
        """Raise where a write must be seen through a given value and through another one that shares its memory."""
        roots: dict[int, list[Node]] = {}
        for node in self._nodes:
            if node in self._given:
                roots.setdefault(self.accesses.cell_of(node), []).append(node)
            elif node in self.kept:
                for cell in self._roots_in(node):
                    roots.setdefault(cell, []).append(node)
        for cell, start in self._starts.items():
            nodes = roots.get(cell, [])
            if len(nodes) < 2 or all(node.op == "placeholder" for node in nodes):
                continue
            is_given = self._given.issuperset(nodes)
            for writer in self._writers.get(cell, ()):
                if not is_given or (writer.label > start and cell in self._read):
                    raise PassError(
                        f"'{nodes[0].name}' and '{nodes[1].name}' share memory that {quoted(writer)} writes, which a "
                        "value given from outside cannot; give one of them, or a node before both, as input"
                    )

    def _roots_in(self, node: Node) -> Iterator[int]:
        """Yield the cells that `node` brings in: what it makes or reads from the model."""
        if node.op == "call_module":
            yield self.accesses.state_of(node)
        cell = self.accesses.cell_of(node)
        if all(self.accesses.cell_of(source) != cell for source in self.accesses.effects.of(node).shares):
            yield cell

    def _find_overwritten(self) -> set[Node]:
        last: dict[int, Node] = {}
        for node in self._nodes:
            if node in self.kept:
                last.update(dict.fromkeys(self.accesses.writes(node), node))
        return {node for node in self._wanted if last.get(self.accesses.cell_of(node), node) > node}
