"""Give nodes qualified names: the path of the module that made them, and what they do there."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from featx.ir.names import identifier_of, name_of_target
from featx.ir.node import Node


class CallSite(NamedTuple):
    """Which call in the code of the model a node is, whatever runs before it.

    Attributes:
        name: its qualified name without a number.
        place: a number for the line, and those of the callers in the module.
        number: how many calls of that name there were before at that place.
        total: how many calls of that name the module makes; None if that is not known.
    """

    name: str
    place: int
    number: int
    total: int | None


class QualifiedNames:
    """Collects the named nodes of a trace and, when it is done, writes `meta["qualified_name"]`.

    The names are torchvision's: `layer1.0.conv1` for a leaf module, `layer1.0.add` for a function in `layer1.0`, and
    `_1`, `_2`... after the second and later ones. A module that ran always keeps its own path at its first call; a
    number that would collide with one is passed over. O(nodes).

    For nodes that come with a place in the code of the model, `meta["call_site"]` has the `CallSite`: numbers may mean
    another call for other inputs.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Node | None, str, str | None, int]] = []

    def add(self, node: Node, module_path: str, stem: str | None = None, place: int = 0) -> None:
        """Note that `node` was made while the module at `module_path` ran.

        `stem` says what it does, where that is not its target, and `place` where in the code.
        """
        self._entries.append((node, module_path, stem, place))

    def skip(self, module_path: str, stem: str | None = None) -> None:
        """Pass over one number of `stem`, for a node that a symbolic trace makes there and this trace does not.

        Without it, of a call of the module: it gets no node if the module around it is kept whole.
        """
        self._entries.append((None, module_path, stem, 0))

    def mark(self) -> int:
        """Return what `forget` needs to drop everything that is added from now on."""
        return len(self._entries)

    def forget(self, mark: int) -> None:
        """Drop what was added since `mark`."""
        del self._entries[mark:]

    def assign(self) -> None:
        """Name all nodes that were added, in their order."""
        reserved = {path for _, path, _, _ in self._entries}
        taken: set[str] = set()
        numbers: dict[str, int] = {}
        of_stems: dict[str, list[tuple[Node, int]]] = {}
        for node, path, given, place in self._entries:
            if node.op == "call_module" if node is not None else given is None:
                name, is_free = path, path not in taken
            else:
                stem = str(given) if node is None else _stem(node, given)
                name = f"{path}.{stem}" if path else stem
                is_free = name not in taken and name not in reserved
            if node is not None and place:
                of_stems.setdefault(name, []).append((node, place))
            if not is_free:
                stem, number = name, numbers.get(name, 0)
                while name in taken or name in reserved:
                    number += 1
                    name = f"{stem}_{number}"
                numbers[stem] = number
            taken.add(name)
            if node is not None:
                node.meta["qualified_name"] = name
        self._entries = []
        for name, calls in of_stems.items():
            seen = Counter[int]()
            for node, place in calls:
                node.meta["call_site"] = CallSite(name, place, seen[place], len(calls))
                seen[place] += 1


def _stem(node: Node, given: str | None) -> str:
    if node.op in ("placeholder", "get_attr"):
        given = node.target.lstrip("*")
    return identifier_of(name_of_target(node.target if given is None else given))
