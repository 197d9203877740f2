"""The modules and functions that features apply to values: where an extractor has them, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from featx.errors import RequestError
from featx.features.describing.info import FeatureInfo
from featx.features.describing.shapes import shapes_in
from featx.features.requests.feature import Feature
from featx.ir.graph import Graph
from featx.ir.torch_layers import is_torch_layer
from featx.module import GraphModule
from featx.passes.shapes import ShapeProp
from featx.tracing.replica.replica import Replica
from featx.tracing.replica.unfinalized import bare_copy_of

# Where the modules are that the user gives for features.
HEADS = "feature_heads"


def head_path(key: str) -> str:
    """Return where the module of a feature is in an extractor."""
    return f"{HEADS}.{''.join(each if each.isalnum() else '_' for each in key)}"


def modules_of(features: Iterable[Feature]) -> dict[str, nn.Module]:
    """Return the modules that features apply, by key."""
    return {str(each.key): each.apply for each in features if isinstance(each.apply, nn.Module)}


def with_heads(model: nn.Module, heads: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that has the parts of `model`, and `heads`, by key; `model` itself if there are none.

    Raises:
        RequestError: the model has a part of the name that the modules are put under, or two keys give one path.
    """
    if not heads:
        return model
    if hasattr(model, HEADS):
        raise RequestError(f"the model has an attribute '{HEADS}', under which the modules of features are put")
    holder = nn.Module()
    for key, head in heads.items():
        name = head_path(key).rpartition(".")[2]
        if name in holder._modules:
            raise RequestError(f"the key '{key}' and another one give the same name to a module, '{name}'")
        holder.add_module(name, head)
    root: nn.Module = bare_copy_of(model)
    root.__dict__.update(model.__dict__, _modules={**model._modules, HEADS: holder})
    return root


def may_write(apply: Callable[..., Any] | nn.Module) -> bool:
    """Say whether a function or a module may write its input: all but layers of torch that are not `inplace`."""
    return not isinstance(apply, nn.Module) or any(
        not is_torch_layer(type(each)) or getattr(each, "inplace", False) for each in apply.modules()
    )


def form_after(apply: Callable[..., Any], info: FeatureInfo) -> tuple[Any, dict[str, tuple[int, ...]], Any]:
    """Return the shape, the shapes inside and the dtype of what a function gives; nothing where it takes no values.

    It runs on a tensor without values, and a module by a replica.
    """
    if info.shape is None:
        return None, {}, None
    graph = Graph()
    root = nn.Module()
    value = graph.placeholder("value")
    try:
        if isinstance(apply, nn.Module):
            root.add_module("head", Replica(apply, copies_tensors="forms").root)
            graph.output(graph.call_module("head", (value,)))
        else:
            graph.output(graph.call_function(apply, (value,)))
        result = ShapeProp(GraphModule(root, graph)).propagate(torch.empty(info.shape, dtype=info.dtype, device="meta"))
    except Exception as error:  # whatever a function of the user's raises that reads values
        is_of_torch = isinstance(apply, nn.Module) and all(is_torch_layer(type(module)) for module in apply.modules())
        if is_of_torch:
            raise RequestError(f"apply of '{info.node}' fails on a value of shape {info.shape}: {error}") from error
        return None, {}, None
    if isinstance(result, torch.Tensor):
        return tuple(result.shape), {}, result.dtype
    return None, shapes_in(result), None
