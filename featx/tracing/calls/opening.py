"""Which modules a trace on an example looks into, and which are one node each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

LeafPolicy = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Opening:
    """Which modules are looked into.

    Attributes:
        is_leaf: says, for a module of the model and its path, whether a call of it is one node.
        opened: the paths of the modules that are traced through, where that is known; `is_leaf` numbers nodes then.
        requested: the paths of modules whose outputs are marked.
        own_output: those whose output gets a node of its own: an edit replaces it, not the same tensor elsewhere.
        opaque_reasons: why modules are one node that `is_leaf` would look into, by path.
        opens_hooked: whether those that have forward hooks, or contain such, are looked into.
    """

    is_leaf: LeafPolicy
    opened: frozenset[str] | None
    requested: frozenset[str]
    own_output: frozenset[str]
    opaque_reasons: Mapping[str, str]
    opens_hooked: bool

    def must_open(self, path: str) -> bool:
        """Say whether a module may not be kept whole instead: the root, and those in which something is asked for."""
        return not path or (self.opened is not None and path in self.opened)
