"""List the names under which the values inside a model can be asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from featx.features.tracing import ModelTracing, TracerName
from featx.ir.graph import Graph
from featx.tracing.modes import in_mode


def get_graph_node_names(
    model: nn.Module,
    tracer_kwargs: Mapping[str, Any] | None = None,
    suppress_diff_warning: bool = False,
    concrete_args: dict[str, Any] | None = None,
    *,
    example_inputs: Any = None,
    tracer: TracerName = "auto",
) -> tuple[list[str], list[str]]:
    """Return the names of the nodes of `model` in execution order, in train and in eval mode.

    A name is the path of the module that made the node and what it does: `layer1.0.conv1` is a leaf module,
    `layer1.0.add` a function that `layer1.0` calls, `layer1.0.relu_2` the third call of one module or function. Any of
    them, and any prefix such as `layer1`, can be given to `create_feature_extractor`.

    The model runs once in each mode, on tensors without values; it is as before afterwards. O(nodes + modules) each.

    Args:
        model: what to trace.
        tracer_kwargs: `leaf_modules`, `autowrap_modules`, `autowrap_functions` and `param_shapes_constant` of
            `FeatureTracer`. Modules of torch.nn and torchvision.ops are leaves always.
        suppress_diff_warning: do not warn when the two lists differ.
        concrete_args: inputs that are fixed to a value, by name.
        example_inputs: as for `create_feature_extractor`.
        tracer: as for `create_feature_extractor`.

    Raises:
        ArgumentTypeError: `model` is not a module.
        TraceError: the model cannot be traced; the message says where and what to do.
    """
    tracing = ModelTracing(model, tracer_kwargs, concrete_args, example_inputs, tracer)
    names: list[list[str]] = []
    for training in (True, False):
        with in_mode(model, training):
            names.append(names_of(tracing.graph()))
    train_names, eval_names = names
    if not suppress_diff_warning:
        warn_of_differences(train_names, eval_names)
    return train_names, eval_names


def names_of(graph: Graph) -> list[str]:
    """Return the qualified names in a traced graph, in execution order."""
    return [node.meta["qualified_name"] for node in graph.nodes if "qualified_name" in node.meta]


def warn_of_differences(train_names: Sequence[str], eval_names: Sequence[str]) -> None:
    """Warn if a model has other nodes in train mode than in eval mode, as torchvision does."""
    if train_names == eval_names:
        return
    if _is_subsequence(eval_names, train_names):
        relation = "The nodes of eval mode are a part of those of train mode."
    elif _is_subsequence(train_names, eval_names):
        relation = "The nodes of train mode are a part of those of eval mode."
    else:
        relation = "The nodes of train mode and of eval mode differ."
    warnings.warn(
        f"{relation} A name may exist in one of them only, or mean another place there; where it matters, give "
        "train_return_nodes and eval_return_nodes separately.",
        stacklevel=3,
    )


def _is_subsequence(part: Sequence[str], whole: Sequence[str]) -> bool:
    remaining = iter(whole)
    return all(name in remaining for name in part)
