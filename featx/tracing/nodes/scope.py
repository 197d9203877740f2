"""The module whose code runs in a trace."""

from __future__ import annotations

from collections.abc import Collection

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


def is_asked_for(path: str, asked_for: Collection[str], caller: Scope) -> bool:
    """Say whether the output of a module, which code in the scope `caller` calls, is that of one of `asked_for`.

    It may be the module itself, or one around it that is not called, such as a ModuleList. O(depth).
    """
    return path in asked_for or any(
        parent in asked_for and not any(f"{called}.".startswith(f"{parent}.") for called in caller.stack)
        for parent in parents_of(path)
    )
