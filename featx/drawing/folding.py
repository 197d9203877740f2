"""Choose which folders of a drawing are open when it is first seen."""

from __future__ import annotations

from featx.drawing.hierarchy import Folder, Item
from featx.drawing.leaves import Leaf

# Boxes under one another that fit on a screen in legible type.
_SCREEN = 18
# A folder with so much of the model in it is opened although the others beside it do not fit.
_MOST = 0.6


def fold(root: Folder, depth: int | None, sizes: bool) -> set[Folder]:
    """Return the folders that are open: `depth` levels below the root, or as many as fit on a screen.

    Rows of equal blocks stay folded in the second case, and are no level of their own in the first. What is around
    highlighted nodes is open. Minor nodes count if `sizes` says so. O(nodes * depth).
    """
    chosen = {root}
    if depth is None:
        _open_what_fits(root, chosen, sizes)
    else:
        _open_levels(root, depth, chosen)
    _reveal(root, chosen)
    return chosen


def visible(folder: Folder, sizes: bool) -> list[Item]:
    """Return what an open folder shows: everything, or everything but the minor nodes."""
    if sizes:
        return folder.children
    return [child for child in folder.children if not (isinstance(child, Leaf) and child.is_minor)]


def _open_levels(folder: Folder, depth: int, chosen: set[Folder]) -> None:
    for child in folder.children:
        if isinstance(child, Folder) and depth > 0:
            chosen.add(child)
            _open_levels(child, depth - bool(child.type_name), chosen)


def _open_what_fits(root: Folder, chosen: set[Folder], sizes: bool) -> None:
    counts = {
        folder: len([leaf for leaf in folder.leaves() if sizes or not leaf.is_minor]) for folder in root.folders()
    }
    shown = visible(root, sizes)
    while True:
        folders = [item for item in shown if isinstance(item, Folder) and not item.row]
        largest = max(folders, key=counts.__getitem__, default=None)
        if largest is None:
            return
        opened = set(folders)
        if _count_after(shown, opened, sizes) > _SCREEN:
            opened = {largest}
            if counts[largest] < _MOST * counts[root] or _count_after(shown, opened, sizes) > _SCREEN:
                return
        chosen |= opened
        shown = [
            below
            for item in shown
            for below in (visible(item, sizes) if isinstance(item, Folder) and item in opened else [item])
        ]


def _count_after(shown: list[Item], opened: set[Folder], sizes: bool) -> int:
    return len(shown) + sum(len(visible(folder, sizes)) - 1 for folder in opened)


def _reveal(folder: Folder, chosen: set[Folder]) -> bool:
    """Open what is around highlighted nodes; return whether there is one in this folder."""
    found = False
    for child in folder.children:
        found |= _reveal(child, chosen) if isinstance(child, Folder) else child.is_highlighted
    if found:
        chosen.add(folder)
    return found
