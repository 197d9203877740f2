"""Dotted paths of modules and nodes: those around a path, what is there, and those that are spelled like it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from torch import nn


def parents_of(path: str) -> list[str]:
    """Return the paths around `path` without the root, the nearest first: `a.b.c` gives `a.b` and `a`."""
    found: list[str] = []  # a generator that is not run to its end would swallow an interrupt
    while "." in path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def module_at(root: object, path: str) -> nn.Module | None:
    """Return the module at `path` in `root`, or None; no code of the classes on the way is run. O(depth)."""
    module: Any = root
    for name in path.split(".") if path else ():
        module = module._modules.get(name) if isinstance(module, nn.Module) else None
    return module if isinstance(module, nn.Module) else None


def held_at(root: object, path: str) -> Any:
    """Return the parameter, buffer, module or other attribute at `path` in `root`, or None, as `module_at` does."""
    owner, _, name = path.rpartition(".")
    module = module_at(root, owner)
    held = () if module is None else (module._parameters, module._buffers, module._modules, module.__dict__)
    for each in held:
        value = each.get(name)  # which a trace does not watch
        if value is not None:
            return value
    return None


def attribute_at(root: object, path: str, default: Any = None) -> Any:
    """Return the attribute of `root` at a dotted path as `getattr` gives it, or `default`."""
    value = root
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            return default
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence for an error, with a space before it, that names what is spelled like `name`, if anything."""
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=3)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
