"""The module whose code runs in a trace."""

from __future__ import annotations


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
