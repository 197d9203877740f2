"""Import what only bulk extraction needs, with the command that installs it where it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from featx.errors import MissingExtraError


def require(module: str, purpose: str, package: str | None = None) -> Any:
    """Return a Python module.

    Args:
        module: its name.
        purpose: what it does here, for the message: "pyarrow writes features".
        package: what pip installs, where that is not the first part of the name.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{purpose}: pip install {package or module.partition('.')[0]}") from error
