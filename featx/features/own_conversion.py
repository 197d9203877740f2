"""Modules that override `_apply`, after `to()` and `half()`, to convert tensors in plain attributes too."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from featx.errors import GraphError
from featx.ir.graph import Graph
from featx.ir.paths import module_at
from featx.module import GraphModule

_KEY = "converted_by_model"


def note_own_conversion(extractor: GraphModule, model: nn.Module, graphs: Iterable[Graph]) -> None:
    """Note the plain tensors that graphs read inside modules with an `_apply` of their own. O(nodes)."""
    paths = {str(node.target) for graph in graphs for node in graph.find_nodes(op="get_attr")}
    owners = {path: _owner_of_conversion(model, path) for path in sorted(paths) if not _is_registered(model, path)}
    found = {path: owner for path, owner in owners.items() if owner is not None}
    if found:
        extractor.meta[_KEY] = found


def check_conversion(extractor: GraphModule, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise where the model would convert a plain tensor that an extractor reads, in a method that it does not have.

    Raises:
        GraphError: there is one, and `convert` gives it another dtype or device.
    """
    noted: Mapping[str, str] = extractor.meta.get(_KEY, {})
    for path, owner in noted.items():
        tensor = operator.attrgetter(path)(extractor)
        converted = convert(tensor.new_empty(0))  # which may write what it is given, as share_memory does
        if (converted.dtype, converted.device) != (tensor.dtype, tensor.device):
            raise GraphError(
                f"cannot convert this extractor to {converted.dtype} on {converted.device}: it reads the tensor "
                f"'{path}', which is no parameter or buffer, and {owner} converts it in a method of its own. To go on, "
                "convert the model, and make the extractor of that"
            )


def _is_registered(model: nn.Module, path: str) -> bool:
    """Say whether a parameter or buffer is at `path`."""
    prefix, _, name = path.rpartition(".")
    owner = module_at(model, prefix)
    return owner is not None and (name in owner._parameters or name in owner._buffers)


def _owner_of_conversion(model: nn.Module, path: str) -> str | None:
    """Return the name of the class of a module around `path` that overrides `_apply`."""
    module: nn.Module | None = model
    for part in path.split("."):
        if module is None:
            return None
        if type(module)._apply is not nn.Module._apply:
            return type(module).__name__
        module = module._modules.get(part)
    return None
