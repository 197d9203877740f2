"""Which module or tensor of the rewritten module each path of a replacement means, and what has to be added."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from featx.containers import is_of_graph_module
from featx.errors import TargetError
from featx.ir.node import Node
from featx.ir.verify import find_attribute
from featx.module import GraphModule
from featx.rewrite.replacement import Replacement
from featx.rewrite.targets import is_interchangeable, longest_prefix
from featx.rewrite.unused import prefixes


class Attributes:
    """Translates the paths of replacements into paths of `module`, and collects what only replacements have.

    A path that the pattern has too means what was matched there, and a path below it what lies below that. Any other
    path means, if `share`, what the module has there, as in torch.fx, if that differs in nothing but the values of its
    tensors; and else what the replacement has. Of that the module gets a copy, under another path if this one is taken.
    """

    def __init__(self, module: GraphModule, *, share: bool) -> None:
        self._module = module
        self._share = share
        self._no_paths: dict[str, str] = {}
        self._own: dict[tuple[Replacement, str], str] = {}
        self._memos: dict[Replacement, dict[int, Any]] = {}
        # What to install, by path, and for a buffer whether it is part of the state dict.
        self._additions: dict[str, tuple[Any, bool | None]] = {}
        # Their paths, and what they lie below.
        self._taken: set[str] = set()
        # By target of a replacement, the names for it that were not tried yet.
        self._names: dict[str, Iterator[str]] = {}

    def paths_for(self, replacement: Replacement, matched: dict[str, str]) -> dict[str, str]:
        """Return the path in the module for each target of `replacement`; `matched` has those of the pattern.

        Nothing is installed yet.

        Raises:
            TargetError: neither the replacement nor the module has a target.
        """
        targets = replacement.targets
        if not targets:
            return self._no_paths
        paths = dict(matched)
        # Shorter ones first: what lies below a module goes where the module goes.
        for target in sorted(targets, key=len):
            if target in paths:
                continue
            owner = longest_prefix(target, paths)
            if owner is None:
                paths[target] = self._own_path(replacement, targets[target])
            else:
                paths[target] = paths[owner] + target[len(owner) :]
                if owner in matched:
                    find_attribute(self._module, paths[target], targets[target])
        return paths

    def _own_path(self, replacement: Replacement, node: Node) -> str:
        key = (replacement, node.target)
        path = self._own.get(key)
        if path is None:
            path = self._own[key] = self._find_path(replacement, node)
        return path

    def _find_path(self, replacement: Replacement, node: Node) -> str:
        target = node.target
        own, present = _value_at(replacement.root, target), _value_at(self._module, target)
        if own is _MISSING:
            if present is not _MISSING:
                return target
            raise TargetError(
                f"node '{node.name}' of the replacement refers to '{target}', which neither the replacement nor "
                f"{self._module._get_name()} has; give the replacement as a module that has it"
            )
        if own is present or (self._share and is_interchangeable(own, present)):
            return target
        path = next(name for name in self._names.setdefault(target, _names_like(target)) if self._is_free(name))
        twin = copy.deepcopy(own, self._memos.setdefault(replacement, {}))
        if isinstance(twin, nn.Module) and not self._module.training:
            twin.eval()
        self._additions[path] = (twin, _is_persistent(replacement.root, target))
        self._taken |= prefixes([path])
        return path

    def _is_free(self, path: str) -> bool:
        if path in self._taken or longest_prefix(path, self._additions) is not None:
            return False
        owner: Any = self._module
        *parents, name = path.split(".")
        for part in parents:
            if not hasattr(owner, part):
                return True
            owner = getattr(owner, part)
            if not is_of_graph_module(owner):
                return False  # no mere container: it may belong to the model that was traced
        return not hasattr(owner, name)

    def install(self, targets: Iterable[str]) -> None:
        """Add to the module what only replacements have, as far as one of `targets` needs it."""
        needed = prefixes(targets)
        for path, (value, is_persistent) in self._additions.items():
            if path not in needed:
                continue
            owner: nn.Module = self._module
            *parents, name = path.split(".")
            for part in parents:
                container = owner._modules.get(part)
                if container is None:
                    container = nn.Module()
                    container.training = self._module.training
                    owner.add_module(part, container)
                owner = container
            if is_persistent is not None:
                owner.register_buffer(name, value, persistent=is_persistent)
            else:
                setattr(owner, name, value)


_MISSING = object()


def _value_at(root: nn.Module | None, path: str) -> Any:  # Any: a module, parameter, buffer or attribute
    value: Any = _MISSING if root is None else root
    for part in path.split("."):
        value = getattr(value, part, _MISSING)
    return value


def _is_persistent(root: nn.Module | None, path: str) -> bool | None:
    """Say whether the buffer at `path` is part of the state dict; None where there is no buffer."""
    parent, _, name = path.rpartition(".")
    owner = _value_at(root, parent) if parent else root
    if not isinstance(owner, nn.Module) or name not in owner._buffers:
        return None
    return name not in owner._non_persistent_buffers_set


def _names_like(path: str) -> Iterator[str]:
    yield path
    flat = path.replace(".", "_")
    if flat != path:
        yield flat
    for number in itertools.count(1):
        yield f"{flat}_{number}"
