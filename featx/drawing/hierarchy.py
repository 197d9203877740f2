"""Turn nodes and the module calls around them into a tree of folders."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from featx.drawing.leaves import Leaf
from featx.drawing.scopes import Call, Scope, shared_depth

# Blocks that stand in a row and do the same are put into a folder of their own from this number on.
_ROW = 3
# In a folder with more in it than this, so many operations that follow one another between modules are folded too.
_CROWD = 80
_BUNDLE = 12
# A row may repeat up to this many different things: a block, and what is done between it and the next.
_PERIOD = 4


@dataclass(eq=False)
class Folder:
    """A call of a module, or a row of equal blocks, with what happens in it.

    What it holds follows one another in the order of the nodes, so no folder reads what comes after it.

    Attributes:
        path: the path of the module; of a row, the path of the module around it.
        label: what it is called inside the folder around it.
        type_name: the class of the module, "" for a row.
        children: folders and nodes, in execution order.
        row: what it repeats, if that is all it does: `12 × EncoderBlock`.
        call: 1, or more where the module was called before; part: likewise where one call is in several folders.
    """

    path: str
    label: str
    type_name: str
    children: list[Item] = field(default_factory=lambda: list[Item]())
    row: str = ""
    call: int = 1
    part: int = 1

    def leaves(self) -> Iterator[Leaf]:
        """Yield the nodes in it, at any depth."""
        pending: list[Item] = [self]
        while pending:
            item = pending.pop()
            if isinstance(item, Leaf):
                yield item
            else:
                pending += reversed(item.children)

    def folders(self) -> Iterator[Folder]:
        """Yield this folder and those in it, outer ones first."""
        pending: list[Folder] = [self]
        while pending:
            folder = pending.pop()
            yield folder
            pending += [child for child in reversed(folder.children) if isinstance(child, Folder)]


Item: TypeAlias = Folder | Leaf


def build_tree(leaves: list[Leaf], scopes: list[Scope], type_name: str) -> Folder:
    """Put `leaves`, in execution order, into folders by their scopes. O(leaves * depth)."""
    root = Folder("", "", type_name)
    _fill(root, leaves, scopes)
    _simplify(root, {})
    return root


def _fill(root: Folder, leaves: list[Leaf], scopes: list[Scope]) -> None:
    open_scope: Scope = ()
    chain = [root]
    calls_seen: dict[str, dict[int | str, int]] = {}
    for leaf, scope in zip(leaves, scopes, strict=True):
        if scope is not open_scope:
            depth = shared_depth(open_scope, scope)
            del chain[depth + 1 :]
            for call in scope[depth:]:
                folder = _open(call, chain[-1], calls_seen.setdefault(call.path, {}))
                chain[-1].children.append(folder)
                chain.append(folder)
            open_scope = scope
        leaf.label = _within(chain[-1].path, leaf.title)
        chain[-1].children.append(leaf)


def _open(call: Call, parent: Folder, seen: dict[int | str, int]) -> Folder:
    """Make a folder for a call; `seen` counts the folders of each call of this module."""
    part = seen[call.key] = seen.get(call.key, 0) + 1
    return Folder(call.path, _within(parent.path, call.path), call.type_name, call=len(seen), part=part)


def _within(path: str, name: str) -> str:
    return name[len(path) + 1 :] if path and name.startswith(f"{path}.") else name


def _simplify(folder: Folder, known: dict[object, int]) -> int:
    """Drop folders around a single node, put equal blocks in a row into one folder; return what the folder looks like.

    `known` gives a number to everything that looks the same.
    """
    looks: list[int] = []
    for position, child in enumerate(folder.children):
        if isinstance(child, Folder):
            look = _simplify(child, known)
            if len(child.children) == 1 and isinstance(child.children[0], Leaf):
                child = folder.children[position] = child.children[0]
                child.label = _within(folder.path, child.title)
                look = _look_of(child, known)
        else:
            look = _look_of(child, known)
        looks.append(look)
    # A row that is all there is in its folder would only be one more thing to open.
    folder.children = list(_rows(folder, looks))
    if len(folder.children) == 1 and isinstance(only := folder.children[0], Folder) and not only.type_name:
        folder.children, folder.row = only.children, only.row
    if len(folder.children) > _CROWD and any(isinstance(child, Folder) for child in folder.children):
        folder.children = list(_bundles(folder))
    return known.setdefault((folder.type_name, tuple(looks)), len(known))


def _look_of(leaf: Leaf, known: dict[object, int]) -> int:
    return known.setdefault((leaf.operation, leaf.settings, leaf.shape), len(known))


def _rows(folder: Folder, looks: list[int]) -> Iterator[Item]:
    children = folder.children
    position = 0
    while position < len(children):
        period, repeats = _longest_row(children, looks, position)
        if repeats < _ROW:
            yield children[position]
            position += 1
            continue
        block = children[position : position + period]
        members = children[position : position + period * repeats]
        first = next(item for item in members if isinstance(item, Folder))
        last = next(item for item in reversed(members) if isinstance(item, Folder))
        names = " + ".join(item.type_name if isinstance(item, Folder) else item.operation for item in block)
        yield Folder(folder.path, _span(first.label, last.label), "", members, f"{repeats} × {names}")
        position += period * repeats


def _bundles(folder: Folder) -> Iterator[Item]:
    for is_operation, group in itertools.groupby(
        folder.children, lambda item: isinstance(item, Leaf) and item.kind != "io"
    ):
        items = list(group)
        if not is_operation or len(items) < _BUNDLE:
            yield from items
            continue
        files = Counter(item.source.rpartition(":")[0].rpartition("/")[2] for item in items if isinstance(item, Leaf))
        count = sum(1 for item in items if isinstance(item, Leaf) and not item.is_minor)
        yield Folder(folder.path, files.most_common(1)[0][0] or "operations", "", items, f"{count} operations")


def _longest_row(children: list[Item], looks: list[int], start: int) -> tuple[int, int]:
    """Return how many items make the block that repeats from `start` on, and how often it does."""
    best = (1, 1)
    for period in range(1, _PERIOD + 1):
        if not any(isinstance(item, Folder) for item in children[start : start + period]):
            continue
        end = start + period
        while end < len(looks) and looks[end] == looks[end - period]:
            end += 1
        repeats = (end - start) // period
        if repeats >= _ROW and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _span(first: str, last: str) -> str:
    """Name a row by its ends: `layer.0 … 11`."""
    head, _, number = last.rpartition(".")
    if head and first.startswith(f"{head}."):
        return f"{first} … {number}"
    stem = last.rstrip("0123456789")
    return f"{first} … {last[len(stem) :]}" if stem and first.startswith(stem) and stem != last else f"{first} … {last}"
