"""Which modules of the model a node belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from featx.ir.node import Node
from featx.ir.paths import module_at, parents_of


class Hierarchy:
    """The modules around the nodes of a graph, from the outermost in; what `root` is called stands for path ''.

    A node belongs to the module whose `forward` made it, and a call of a module to that module. O(depth) a node.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # By path: the name of the class.
        self._kinds = {"": root._get_name()}
        self._around: dict[tuple[str, ...], tuple[str, ...]] = {}

    def around(self, node: Node) -> tuple[str, ...]:
        """Return the paths of the modules around a node: '', 'layer1', 'layer1.0'."""
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        paths = [""]
        for path, kind in stack.values():
            if path:
                paths.append(path)
                self._kinds.setdefault(path, getattr(kind, "__name__", str(kind).rpartition(".")[2]))
        if node.op == "call_module" and node.target != paths[-1]:
            for path in (*reversed(parents_of(node.target)), node.target):
                if path not in paths:
                    paths.append(path)
                    self._kinds.setdefault(path, self._kind_of(path))
        found = tuple(paths)
        return self._around.setdefault(found, found)  # one tuple for all nodes of a module

    def kind(self, path: str) -> str:
        """Return the name of the class of a module that `around` has returned."""
        return self._kinds[path]

    def _kind_of(self, path: str) -> str:
        module = module_at(self._root, path)
        return "" if module is None else module._get_name()
