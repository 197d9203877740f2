"""Decide which modules of a model an extractor looks into: those that a requested value lies inside, and no other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from featx.tracing.scope import walk_modules


def opened_for(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules that must be traced through so that each of `names` has a node.

    The value of a module needs the modules around it, any other value the module that computes it too. The model itself
    has the path "". O(modules + names * depth).
    """
    paths = {path for path, _ in walk_modules(model)}
    opened = {""}
    for name in names:
        owner = name.rpartition(".")[0]
        if name not in paths:
            while owner and owner not in paths:
                owner = owner.rpartition(".")[0]
        while owner:
            opened.add(owner)
            owner = owner.rpartition(".")[0]
    return frozenset(opened)
