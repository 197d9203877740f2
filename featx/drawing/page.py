"""Write a tree of nodes as one HTML page, which shows it with the scripts in `viewer/` and loads nothing else."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from importlib import resources
from typing import Any

from featx.drawing.costs import is_summed
from featx.drawing.dot import heading
from featx.drawing.hierarchy import Folder
from featx.drawing.kinds import KINDS
from featx.drawing.leaves import Leaf

_SCRIPTS = (
    "model.js",
    "layers.js",
    "columns.js",
    "boxes.js",
    "paint.js",
    "canvas.js",
    "outline.js",
    "details.js",
    "main.js",
)


def write_page(root: Folder, opened: set[Folder], sizes: bool, title: str) -> str:
    """Return the page: under 300 bytes a node, and what the viewer itself takes. O(nodes + edges)."""
    data = json.dumps(page_data(root, opened, sizes, title), ensure_ascii=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "style": _viewer_file("style.css"),
        # In JSON a < stands in strings only; so no name can end the element that the data is in.
        "data": data.replace("<", "\\u003c"),
        "script": "\n".join(_viewer_file(name) for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], _viewer_file("page.html"))


def _viewer_file(name: str) -> str:
    return resources.files("featx.drawing").joinpath(f"viewer/{name}").read_text(encoding="utf-8")


def page_data(root: Folder, opened: set[Folder], sizes: bool, title: str) -> dict[str, Any]:
    """Return the data of the graph for the page, as values of JSON; `viewer/model.js` reads it.

    Nodes and folders have numbers, in execution order. Of nodes there is a list for each of their properties, in which
    a text is its place in `texts`; what few nodes have is listed by number.
    """
    leaves = list(root.leaves())
    places = {leaf.index: place for place, leaf in enumerate(leaves)}
    folders = list(root.folders())
    numbers = {folder: number for number, folder in enumerate(folders)}
    texts = _Texts()
    parents = {leaf: numbers[folder] for folder in folders for leaf in folder.children if isinstance(leaf, Leaf)}
    return {
        "title": title,
        "sizes": sizes,
        "kinds": KINDS,
        "folders": _folder_rows(root, numbers),
        "open": [number for folder, number in numbers.items() if folder in opened],
        "label": [leaf.label for leaf in leaves],
        "folder": [parents[leaf] for leaf in leaves],
        "flags": [_flags(leaf, folders[parents[leaf]]) for leaf in leaves],
        "inputs": [[place - places[item] for item in leaf.inputs] for place, leaf in enumerate(leaves)],
        "kind": [texts.place(leaf.kind) for leaf in leaves],
        "operation": [texts.place(leaf.operation) for leaf in leaves],
        "call": [texts.place(leaf.call) for leaf in leaves],
        "settings": [texts.place(leaf.settings) for leaf in leaves],
        "shape": [texts.place(leaf.shape) for leaf in leaves],
        "dtype": [texts.place(leaf.dtype) for leaf in leaves],
        "source": [texts.place(leaf.source) for leaf in leaves],
        "parameters": {place: leaf.parameters for place, leaf in enumerate(leaves) if leaf.parameters},
        "shared": {
            place: leaf.parameters - leaf.new_parameters
            for place, leaf in enumerate(leaves)
            if leaf.parameters != leaf.new_parameters
        },
        "costs": (costs := _cost_columns(leaves)),
        "summed": [name for name in costs if is_summed(name)],
        "name": {place: leaf.name for place, leaf in enumerate(leaves) if leaf.name != leaf.title},
        "nodeName": {
            place: leaf.node_name for place, leaf in enumerate(leaves) if leaf.node_name != _usual_name(leaf.name)
        },
        "thumbnails": {
            place: [leaf.thumbnail.width, leaf.thumbnail.height, base64.b64encode(leaf.thumbnail.pixels).decode()]
            for place, leaf in enumerate(leaves)
            if leaf.thumbnail is not None
        },
        "texts": texts.all,
    }


class _Texts:
    """Gives each text a place, once."""

    def __init__(self) -> None:
        self.all: list[str] = [""]
        self._places = {"": 0}

    def place(self, text: str) -> int:
        place = self._places.setdefault(text, len(self.all))
        if place == len(self.all):
            self.all.append(text)
        return place


def _folder_rows(root: Folder, numbers: dict[Folder, int]) -> list[list[Any]]:
    """Describe each folder: number of the one around it, label, path, class, row, first node and the one after it."""
    rows: list[list[Any]] = [[]] * len(numbers)

    def describe(folder: Folder, parent: int, start: int) -> int:
        number, end = numbers[folder], start
        for child in folder.children:
            end = describe(child, number, end) if isinstance(child, Folder) else end + 1
        rows[number] = [parent, heading(folder), folder.path, folder.type_name, folder.row, start, end]
        return end

    describe(root, -1, 0)
    return rows


def _flags(leaf: Leaf, folder: Folder) -> int:
    is_relative = bool(folder.path) and leaf.label != leaf.title
    return is_relative + 2 * leaf.has_qualified_name + 4 * leaf.is_minor + 8 * leaf.is_highlighted


def _usual_name(qualified_name: str) -> str:
    return qualified_name.replace(".", "_")


def _cost_columns(leaves: list[Leaf]) -> dict[str, dict[int, float]]:
    columns: dict[str, dict[int, float]] = {}
    counted = any(leaf.parameters for leaf in leaves)
    for place, leaf in enumerate(leaves):
        for name, number in leaf.costs.items():
            # What the module itself says of its parameters counts shared ones once.
            if number and _is_in_json(number) and not (counted and name == "parameters"):
                columns.setdefault(name, {})[place] = float(f"{number:.6g}") if isinstance(number, float) else number
    return columns


def _is_in_json(number: float) -> bool:
    # Python would write NaN and Infinity, which no browser reads.
    return isinstance(number, int) or math.isfinite(number)
