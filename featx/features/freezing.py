"""Freeze parameters and batch norms of a graph module, and undo that alone.

What was frozen is kept in `meta`: `frozen_parameters`, the names of those that were trained before, and `frozen_norms`,
the mode that each batch norm would be in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from featx.module import GraphModule

# What keeps statistics of the batches that it sees in train mode.
BatchNorm = nn.modules.batchnorm._BatchNorm


def freeze_parameters(module: GraphModule, paths: Iterable[str]) -> None:
    """Train the parameters at these paths no more, nor those inside the modules there. O(parameters)."""
    around = tuple(f"{path}." for path in paths)
    trained = {
        name: parameter for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and f"{name}.".startswith(around)
    }  # fmt: skip
    for parameter in trained.values():
        parameter.requires_grad_(False)
    module.meta["frozen_parameters"] = [*module.meta.get("frozen_parameters", ()), *trained]


def freeze_norms(module: GraphModule, paths: Iterable[str]) -> None:
    """Put the batch norms among these submodules into eval mode, and train them no more. O(modules)."""
    modules = dict(module.named_modules())
    norms = [path for path in paths if isinstance(modules[path], BatchNorm)]
    frozen = module.meta.get("frozen_norms", {})
    module.meta["frozen_norms"] = {**frozen, **{path: modules[path].training for path in norms if path not in frozen}}
    for path in norms:
        modules[path].training = False
    freeze_parameters(module, norms)


def keep_frozen_norms(module: GraphModule) -> None:
    """Put batch norms that are frozen back into eval mode, after `train` has put them into another one. O(modules)."""
    frozen: dict[str, Any] = module.meta.get("frozen_norms", {})
    modules = dict(module.named_modules()) if frozen else {}
    module.meta["frozen_norms"] = {path: modules[path].training for path in frozen}
    for path in frozen:
        modules[path].training = False


def unfreeze(module: GraphModule) -> None:
    """Undo what the functions of this file have done to a module: what was frozen before stays so. O(parameters)."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in module.meta.get("frozen_parameters", ()):
        parameters[name].requires_grad_(True)
    modules = dict(module.named_modules())
    for path, mode in module.meta.get("frozen_norms", {}).items():
        modules[path].training = mode
    module.meta.update(frozen_parameters=[], frozen_norms={})
