"""Write a folded tree of nodes in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterator

from featx.drawing.folding import visible
from featx.drawing.hierarchy import Folder, Item
from featx.drawing.leaves import Leaf

# Of each family the colour that fills its boxes, on white paper; `svg.py` has those for the dark.
FILLS = {
    "io": "#dff3e4", "layer": "#dce9fa", "norm": "#d9f2f0", "activation": "#fdeed3", "attention": "#fbe0ea",
    "pool": "#ebe3fa", "math": "#eceff3", "shape": "#f6f7f9", "dropout": "#f6f7f9", "module": "#e2e6fb",
    "constant": "#f4f1e4", "number": "#ffffff", "check": "#ffffff",
}  # fmt: skip
_HEAD = """\
  graph [fontname="Helvetica", fontsize=12, bgcolor="transparent", nodesep=0.22, ranksep=0.34, compound=true]
  node [fontname="Helvetica", fontsize=11, shape=box, style="rounded,filled", color="#9aa3ad", fontcolor="#1f2328", \
margin="0.14,0.07", height=0.3]
  edge [color="#7d8792", arrowsize=0.6]"""

_CLUSTER = 'labeljust=l; style="rounded,filled"; color="#c3cad2"; fillcolor="#00000008"'


def write_dot(root: Folder, opened: set[Folder], sizes: bool, title: str) -> str:
    """Describe the picture: open folders as clusters, folded ones and nodes as boxes. O(nodes + edges)."""
    lines = ["digraph {", f"  tooltip={_quote(title)}", _HEAD]
    lines += _boxes(root, opened, sizes, "  ")
    lines += _edges(root, opened, sizes)
    return "\n".join([*lines, "}\n"])


def count_drawn(root: Folder, opened: set[Folder], sizes: bool) -> int:
    """Return how many boxes `write_dot` draws."""
    return sum(1 for _ in _drawn(root, opened, sizes))


def _drawn(folder: Folder, opened: set[Folder], sizes: bool) -> Iterator[Item]:
    for item in visible(folder, sizes):
        if isinstance(item, Folder) and item in opened:
            yield from _drawn(item, opened, sizes)
        else:
            yield item


def _boxes(folder: Folder, opened: set[Folder], sizes: bool, indent: str) -> Iterator[str]:
    for item in visible(folder, sizes):
        if isinstance(item, Leaf):
            yield f"{indent}{_name(item)} [{_look_of_leaf(item)}]"
        elif item not in opened:
            yield f"{indent}{_name(item)} [{_look_of_folder(item, sizes)}]"
        else:
            yield f"{indent}subgraph cluster_{_name(item)} {{"
            label = _quote(" · ".join([heading(item), *subheading(item)]))
            yield f"{indent}  label={label}; {_CLUSTER}"
            yield from _boxes(item, opened, sizes, indent + "  ")
            yield f"{indent}}}"


def _edges(root: Folder, opened: set[Folder], sizes: bool) -> Iterator[str]:
    boxes: dict[int, Item] = {}
    readers: list[Leaf] = []
    for item in _drawn(root, opened, sizes):
        for leaf in item.leaves() if isinstance(item, Folder) else (item,):
            boxes[leaf.index] = item
            readers.append(leaf)
    written: set[tuple[str, str]] = set()
    for leaf in readers:
        for source in leaf.inputs:
            if source in boxes and boxes[source] is not boxes[leaf.index]:
                edge = (_name(boxes[source]), _name(boxes[leaf.index]))
                if edge not in written:
                    written.add(edge)
                    yield f"  {edge[0]} -> {edge[1]}"


def _name(item: Item) -> str:
    # Folders hold a node at least, and the first node of a folder is that of the first folder in it: so depth tells.
    if isinstance(item, Leaf):
        return f"n{item.index}"
    level, inside = 0, item.children[0]
    while isinstance(inside, Folder):
        level, inside = level + 1, inside.children[0]
    return f"f{inside.index}_{level}"


def heading(folder: Folder) -> str:
    """Name a folder inside the one around it, with a number where it is not the first of its name."""
    again = f" (call {folder.call})" if folder.call > 1 else ""
    return folder.label + again + (f" (part {folder.part})" if folder.part > 1 else "")


def subheading(folder: Folder) -> list[str]:
    """Say what a folder is."""
    return [text for text in (folder.type_name, folder.row) if text]


def _look_of_leaf(leaf: Leaf) -> str:
    second = [] if leaf.kind == "io" or leaf.operation == leaf.label else [leaf.operation]
    below = "  ".join([*second, *([leaf.shape] if leaf.shape else [])])
    tooltip = "\n".join(text for text in (leaf.name, leaf.call_with_names(), leaf.dtype, leaf.source) if text)
    label = "\n".join(text for text in (leaf.label, below) if text)
    look = f'class="{leaf.kind}", fillcolor="{FILLS[leaf.kind]}"'
    if leaf.is_highlighted:
        look = f'class="{leaf.kind} marked", fillcolor="{FILLS[leaf.kind]}", color="#d9480f", penwidth=2.2'
    return f"label={_quote(label)}, tooltip={_quote(tooltip)}, {look}"


def _look_of_folder(folder: Folder, sizes: bool) -> str:
    nodes = [leaf for leaf in folder.leaves() if sizes or not leaf.is_minor]
    shapes = [leaf.shape for leaf in nodes if leaf.shape and leaf.kind != "constant"]
    below = "  ".join([*subheading(folder), shapes[-1] if shapes else f"{len(nodes)} nodes"])
    sides = ", peripheries=2" if folder.row else ""
    label, tooltip = _quote(f"{heading(folder)}\n{below}"), _quote(folder.path)
    return f'label={label}, tooltip={tooltip}, shape=folder, class="folder", fillcolor="#ffffff"{sides}'


def _quote(text: str) -> str:
    # In a label a backslash starts an escape: \\n is a line break and \\N the name of the node.
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
