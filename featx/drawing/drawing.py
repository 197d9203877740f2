"""Turn a graph into a `Drawing`, which can be looked at in a notebook and saved as a page, a picture or dot."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from torch import nn

from featx.drawing.costs import Costs
from featx.drawing.dot import count_drawn, write_dot
from featx.drawing.folding import fold
from featx.drawing.hierarchy import Folder, build_tree
from featx.drawing.leaves import Describer
from featx.drawing.nesting import describe_graph, nested_graphs
from featx.drawing.page import write_page
from featx.drawing.svg import render_svg
from featx.drawing.thumbnails import thumbnails_of
from featx.errors import ArgumentTypeError, DrawingError, ForeignNodeError
from featx.examples import Example, inputs_of
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.module import GraphModule, is_of_torch_fx
from featx.traced import as_graph_module, has_several_graphs


def draw(
    graph: nn.Module | Graph,
    *inputs: Any,
    example_inputs: Any = None,
    thumbnails: bool = False,
    depth: int | None = None,
    cost: Costs = None,
    highlight: Iterable[Node | str] = (),
    sizes: bool = False,
    max_nodes: int = 500,
    title: str | None = None,
) -> Drawing:
    """Draw a graph, folded by the modules of the model that it was traced from.

    The drawing shows the graph as it is now; neither the graph nor the module is changed. It holds what `trace` and
    shape propagation left in the `meta` of the nodes: modules, names, shapes, dtypes and source lines, each where it is
    there. Blocks that repeat in a row are folded into one, and graph modules that the graph calls are folders too.
    O(nodes + edges) time, about 2 KB memory a node.

    Args:
        graph: what to draw. A GraphModule also says what its submodules and weights are; of an extractor it is the
            graph of the present mode. A model is traced.
        inputs: for a model; by default those that it declares or its first layer suggests.
        example_inputs: the inputs in place of `inputs`: a tensor, a tuple of positional inputs, or a dict of inputs by
            name.
        thumbnails: run the graph on the inputs, which must be given, and show in each box of the page the map that it
            computes of the first image, as its first three principal components. About 5 KB a map.
        depth: how many levels of modules are open at first: 0 shows those that the model itself calls, a large number
            everything. By default as many as fit on a screen.
        cost: numbers to show, by node or name of a node: each a number, a mapping from names to numbers, or an object
            with such fields; or a report whose `nodes` have a `name`. They are added up over modules, but for peaks,
            extremes, means and ratios, as their names say. NaN and infinity are left out. By default
            `node.meta["cost"]`.
        highlight: nodes to mark, or names of nodes, or paths of modules, which stand for all nodes in them; the
            modules around them are open.
        sizes: show also numbers that are made of sizes, and checks that an input is like the example. The page can
            show them in any case.
        max_nodes: how many boxes dot may be asked to lay out; it takes minutes for some thousands.
        title: what to call it; the name of the module by default.

    Raises:
        ArgumentTypeError: `graph` is not a graph, or `cost` holds no numbers.
        GraphError: a node reads one that is not before it.
        ForeignNodeError: a node in `highlight` is not in the graph.
    """
    model = graph
    if inputs and isinstance(inputs[0], (str, os.PathLike)):
        raise ArgumentTypeError(f"draw takes the inputs of the model; to write a file, draw(...).save({inputs[0]!r})")
    if isinstance(graph, Graph):
        args, kwargs = inputs_of(inputs, {}, example_inputs)
    else:
        graph, args, kwargs = as_graph_module(graph, inputs, {}, example_inputs)
    module = graph if isinstance(graph, GraphModule) else None
    if thumbnails and (module is None or (not inputs and example_inputs is None)):
        raise ArgumentTypeError("thumbnails need a model or a GraphModule, and an image: draw(model, image, ...)")
    example = Example(args, kwargs, "the drawing")
    pictures = thumbnails_of(module, example, cast(nn.Module, model)) if thumbnails and module is not None else {}
    drawn = module.graph if module is not None else graph
    if not isinstance(drawn, Graph):
        raise ArgumentTypeError(_advice(drawn))
    owner = drawn.owning_module if module is None else module
    owner = owner if isinstance(owner, nn.Module) else None
    name = owner._get_name() if owner is not None else "Graph"
    describer = Describer(drawn, cost, _marked(drawn, owner, highlight), pictures)
    described = list(describe_graph(describer, drawn, owner))
    root = build_tree([leaf for leaf, _ in described], [scope for _, scope in described], name)
    return Drawing(title or name, root, depth, sizes, max_nodes)


def _advice(given: object) -> str:
    kind = type(given)
    if isinstance(given, nn.Module) and is_of_torch_fx(given):
        return "draw takes graphs of featx; for one of torch.fx: featx.draw(featx.from_torch_fx(module))"
    if has_several_graphs(given):
        return f"{kind.__name__} has a graph for each case; draw one of them: featx.draw(extractor.extractors[0])"
    return f"graph must be a model, or a featx GraphModule or Graph, got {kind.__name__}"


def _marked(graph: Graph, module: nn.Module | None, highlight: Iterable[Node | str]) -> set[Node]:
    wanted = [highlight] if isinstance(highlight, (str, Node)) else list(highlight)
    if not wanted:
        return set()
    nodes = [node for nested, _ in nested_graphs(graph, module) for node in nested.nodes]
    known = set(nodes)
    names: dict[str, list[Node]] = {}
    for node in nodes:
        path = str(node.meta.get("qualified_name"))
        for name in {node.name, path, *parents_of(path)}:
            names.setdefault(name, []).append(node)
    marked: set[Node] = set()
    for item in wanted:
        found = names.get(item, []) if isinstance(item, str) else [item]
        if not found or not known.issuperset(found):
            raise ForeignNodeError(
                f"highlight has {item!r}, which is not in the graph; give nodes of it, their names or paths of modules"
            )
        marked.update(found)
    return marked


class Drawing:
    """A picture of a graph as it was when it was drawn: `save` it, or show it as the last line of a notebook's cell.

    Attributes:
        title: what it is called.
        root: the folders and nodes.
    """

    def __init__(self, title: str, root: Folder, depth: int | None, sizes: bool, max_nodes: int) -> None:
        self.title = title
        self.root = root
        self._open = fold(root, depth, sizes)
        self._sizes = sizes
        self._max_nodes = max_nodes

    @property
    def dot(self) -> str:
        """The picture in Graphviz's language, as it is folded."""
        return write_dot(self.root, self._open, self._sizes, self.title)

    def svg(self) -> str:
        """Return the picture as SVG, as it is folded; it follows the reader's light or dark mode.

        Raises:
            DrawingError: Graphviz is not installed, or there are more boxes to draw than `max_nodes`.
        """
        count = count_drawn(self.root, self._open, self._sizes)
        if count > self._max_nodes:
            raise DrawingError(
                f"'{self.title}' unfolded to this depth has {count} boxes, more than max_nodes={self._max_nodes}; give "
                f"a smaller depth, raise max_nodes, or save it as .html, which takes any number"
            )
        return render_svg(self.dot)

    def html(self) -> str:
        """Return the picture as a page that folds, unfolds and searches, and loads nothing else."""
        return write_page(self.root, self._open, self._sizes, self.title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file; its ending says as what: `.html`, `.svg` or `.dot`.

        Raises:
            DrawingError: another ending, the file cannot be written, or as for `svg`.
        """
        file = Path(path)
        writers = {".html": self.html, ".svg": self.svg, ".dot": lambda: self.dot}
        write = writers.get(file.suffix.lower())
        if write is None:
            raise DrawingError(f"'{file}' ends in '{file.suffix}'; save a drawing as {', '.join(writers)}")
        text = write()
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DrawingError(f"'{file}' cannot be written: {error.strerror}") from error

    def _repr_html_(self) -> str:
        # In a frame, so that the page and the notebook keep to their own styles and keys.
        page = html.escape(self.html())
        style = "width: 100%; height: 640px; border: 1px solid #8884; border-radius: 6px"
        return f'<iframe srcdoc="{page}" style="{style}" sandbox="allow-scripts" allow="clipboard-write"></iframe>'

    def __repr__(self) -> str:
        return f"<Drawing of {self.title}; save it as .html, .svg or .dot>"
