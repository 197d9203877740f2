"""What a graph checks of values that it returns: that no later call has written them in place."""

from __future__ import annotations

from typing import Any

import torch

from featx.errors import MutationError
from featx.ir.runtime_checks import runtime_check
from featx.tree import tensors_in


@runtime_check
def version_of(value: Any) -> int:
    """Return how often the tensors in `value` were written in place; -1 where torch does not count that.

    It does not in inference mode, nor do compilers and exporters, for which a graph writes what it says.
    """
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return -1
    else:  # noqa: RET505 - TorchScript reads what is after an `if` that returns
        return _counted(value)


@runtime_check
def check_version(value: Any, version: int, what: str) -> None:
    """Raise if a value was written in place since `version_of` gave `version`, where both are counted.

    Raises:
        MutationError: it was; `what` names it, and the modules that may have done it.
    """
    now = version_of(value)
    if now != version and now >= 0 and version >= 0:  # a compiler may have broken the graph in between
        raise MutationError(
            f"{what}, which did not do that on the example. To go on, request a name inside that module too, which is "
            "traced then, or make the extractor with an example for which it writes."
        )


def _counted(value: Any) -> int:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return -1
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():  # a trace of the extractor follows no versions
            return -1 if value.is_inference() else value._version
    versions = [_counted(leaf) for leaf in tensors_in(value)]
    return -1 if -1 in versions else sum(versions)
