"""The module whose code runs in a trace."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from featx.ir.paths import parents_of


class Scope:
    """One call of a module that runs during the trace: its path, its type, and the calls around it."""

    __slots__ = ("module_path", "module_type", "place", "stack")

    def __init__(
        self, module_path: str, module_type: type | None, outer: dict[str, tuple[str, type]] | None = None
    ) -> None:
        self.module_path = module_path
        self.module_type = module_type
        self.place = (module_path, module_type)
        outer = outer or {}
        self.stack = {**outer, module_path: (module_path, module_type)} if module_type else outer


def name_of_traced(root: object) -> str:
    """Return what messages call a model or function that is traced: the name of its class, or its own."""
    return type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "function")


def requested_by(path: str, requested: Collection[str], outer: Collection[str]) -> list[str]:
    """Return those of the paths `requested` whose value is the output of a call of the module at `path`. O(depth).

    That is the module itself, and those around it that are not called themselves, such as a ModuleList.

    Args:
        path: of the module.
        requested: paths of modules.
        outer: the paths of the modules in whose calls it is called.
    """
    found = [path] if path in requested else []
    for parent in parents_of(path):
        if parent in requested and not any(f"{called}.".startswith(f"{parent}.") for called in outer):
            found.append(parent)
    return found
