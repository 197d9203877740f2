"""Say why something of torch.fx is not in `featx.fx`, and what serves instead."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable
from typing import Any

from featx.errors import LeftOutError, LeftOutImportError

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def explainer(module_name: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of `featx.fx`, which Python calls for names that it does not have.

    It imports submodules of torch.fx when they are asked for, as torch.fx has all of them, and raises for any other
    name, with the reason from the table.

    Raises:
        LeftOutError: the name is read as an attribute, so that `hasattr` is False.
        LeftOutImportError: the name is imported, so that `except ImportError` catches it.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the module's own
        if name.startswith("__"):
            raise AttributeError(f"module '{module_name}' has no attribute '{name}'")
        # The table is read only here: most code never needs it.
        from featx.migration.table import TABLE, reason

        path = ".".join(module_name.split(".")[2:])
        if (f"{path}.{name}" if path else name) in TABLE:
            return importlib.import_module(f"{module_name}.{name}")
        message = f"'{name}' of {module_name.replace('featx', 'torch', 1)} is not in featx.fx: {reason(path, name)}"
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
            # Python would replace an AttributeError by a message of its own.
            raise LeftOutImportError(message)
        raise LeftOutError(message)

    return __getattr__
