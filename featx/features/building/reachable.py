"""Give an extractor the modules that code of its parts reaches without their being registered there.

`self.shared = [decoder]` keeps a module from being registered twice, and `object.__setattr__(self, "parent", model)`
from being a part of its own part. Such modules run when an extractor runs, so that its state dict, `train` and `to`
must reach them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from featx.ir.modules import modules_of, walk_modules
from featx.ir.torch_layers import is_torch_layer
from featx.shared_attributes import share
from featx.tracing.objects.references import referred_to

# What nn.Module keeps in each module, apart from hooks.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})


def share_reachable_modules(extractor: nn.Module, model: nn.Module) -> None:
    """Register modules of `model` that attributes of modules of `extractor` lead to, under their paths there.

    Of a module that has parts in `extractor` already, the missing ones are registered. O(modules + attributes).
    """
    present = set(extractor.modules())
    paths = {module: path for path, module in walk_modules(model)}
    missing = [module for module in paths if module not in present]
    own = [module for module in present if module in paths and not is_torch_layer(type(module))]
    held = [value for module in own for value in _held_by(module)]
    if not held or not missing:
        return
    for module in referred_to(held, missing):
        for path in _paths_to_share(module, paths[module], present):
            share(model, extractor, path)


def _held_by(module: nn.Module) -> Iterator[Any]:
    for name, value in module.__dict__.items():
        is_empty = isinstance(value, (dict, list, tuple, set)) and not value
        if name not in _REGISTERED and not is_empty:
            yield value


def _paths_to_share(module: nn.Module, path: str, present: set[nn.Module]) -> Iterator[str]:
    """Yield the paths of what is missing of a module: it, or where parts of it are there, the others."""
    if path and present.isdisjoint(modules_of(module)):
        yield path
        return
    prefix = f"{path}." if path else ""
    for name in (*module._parameters, *module._buffers):
        yield prefix + name
    for name, child in module._modules.items():
        if child is not None and child not in present:
            yield from _paths_to_share(child, prefix + name, present)
