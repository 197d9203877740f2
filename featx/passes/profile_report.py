"""What `profile` gives: the time of each node and of each module, as dataclasses and as tables."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from featx.passes.table_format import clipped, format_table, in_seconds


@dataclass(frozen=True)
class NodeTime:
    """The time of one node, in seconds.

    Attributes:
        name: of the node, in the code.
        op: its opcode.
        target: what it calls.
        path: of the module that it belongs to.
        seconds: the median.
        fastest: the shortest.
        slowest: the longest.
        share: of the sum of all nodes.
        qualified_name: what the node can be asked for as, where that is known.
    """

    name: str
    op: str
    target: str
    path: str
    seconds: float
    fastest: float
    slowest: float
    share: float
    qualified_name: str = ""


@dataclass(frozen=True)
class ModuleTime:
    """The sum over the `nodes` of the module at `path`, of class `kind`, and of the modules inside it, in seconds."""

    path: str
    kind: str
    nodes: int
    seconds: float
    share: float


@dataclass(frozen=True, repr=False)
class ProfileReport:
    """The times of a graph.

    Attributes:
        nodes: the nodes in their order, without inputs and output.
        modules: the modules in the order in which they first ran, before them ('' as path) the whole graph.
        seconds: the sum over the nodes.
        call_seconds: the median time of a call of the module as a whole.
        repeats: how often each was measured.
    """

    nodes: tuple[NodeTime, ...]
    modules: tuple[ModuleTime, ...]
    seconds: float
    call_seconds: float
    repeats: int

    def node_table(self, top: int | None = None) -> str:
        """Return a table of the nodes that take longest, or of the `top` of them."""
        rows: list[tuple[str, ...]] = []
        so_far = 0.0
        for node in sorted(self.nodes, key=lambda node: -node.seconds)[:top]:
            so_far += node.share
            times = (in_seconds(node.seconds), in_seconds(node.fastest), in_seconds(node.slowest))
            rows.append(
                (
                    node.qualified_name or node.name,
                    clipped(node.target, 40),
                    *times,
                    _percent(node.share),
                    _percent(so_far),
                )
            )
        return format_table(("node", "target", "median", "fastest", "slowest", "share", "so far"), rows)

    def module_table(self, depth: int | None = None) -> str:
        """Return a table of the modules, or only of those at most `depth` levels inside the outermost."""
        rows: list[tuple[str, ...]] = []
        for module in self.modules:
            level = module.path.count(".") + 1 if module.path else 0
            if depth is None or level <= depth:
                name = f"{'  ' * level}{module.path.rpartition('.')[2] or module.kind}"
                rows.append((name, module.kind, str(module.nodes), in_seconds(module.seconds), _percent(module.share)))
        return format_table(("module", "class", "nodes", "time", "share"), rows)

    def __repr__(self) -> str:
        return (
            f"<ProfileReport of {self.modules[0].kind}: {in_seconds(self.call_seconds)} a call, {len(self.nodes)} "
            "nodes; print it for a table>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        return "\n\n".join(
            [
                self.node_table(top=20),
                self.module_table(depth=1),
                f"{len(self.nodes)} nodes take {in_seconds(self.seconds)}, a call of the whole "
                f"{in_seconds(self.call_seconds)} (medians of {self.repeats})",
            ]
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
