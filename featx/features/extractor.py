"""Build a module that returns chosen values from inside a model, and runs only what they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from featx.errors import RequestError
from featx.features.dual import DualGraphModule
from featx.features.nodes import names_of, warn_of_differences
from featx.features.prune import prune
from featx.features.select import as_request, select
from featx.features.tracing import check_model, in_mode, trace_in_mode
from featx.ir.graph import Graph

Request = Mapping[str, str] | Sequence[str]


def create_feature_extractor(
    model: nn.Module,
    return_nodes: Request | None = None,
    train_return_nodes: Request | None = None,
    eval_return_nodes: Request | None = None,
    tracer_kwargs: Mapping[str, Any] | None = None,
    suppress_diff_warning: bool = False,
    concrete_args: dict[str, Any] | None = None,
) -> DualGraphModule:
    """Return a module that computes the requested values of `model`, as a dict, and nothing that they do not need.

    A value is what the node had when it was computed, even where the model overwrites it later. Weights are shared
    with `model`, those that are not needed are dropped, and the keys of the state dict stay the model's. `train()` and
    `eval()` switch between the graphs of the two modes. `model` is as before afterwards, also after an error.

    The model runs symbolically, once in each mode; O(nodes + modules) each.

    Args:
        model: where the values come from.
        return_nodes: a dict from node names to keys of the result, or a list of names that are the keys too. See
            `get_graph_node_names`; the path of a module means the last node under it.
        train_return_nodes: what train mode returns, where the modes differ; together with `eval_return_nodes`.
        eval_return_nodes: what eval mode returns.
        tracer_kwargs: as for `get_graph_node_names`.
        suppress_diff_warning: do not warn when the modes have different nodes.
        concrete_args: inputs that are fixed to a value, by name.

    Raises:
        NodeNameError: a name does not exist in a mode; the message has close matches.
        RequestError: nothing is requested, too much is, or one key is given twice.
        ArgumentTypeError: `model` is not a module, or the request is neither a dict nor a list.
        TraceError: the model cannot be traced symbolically; the message says where and what to do.
    """
    check_model(model)
    requests = _requests(return_nodes, train_return_nodes, eval_return_nodes)
    class_name = type(model).__name__
    graphs: list[Graph] = []
    names: list[list[str]] = []
    for training, request in zip((True, False), requests, strict=True):
        with in_mode(model, training):
            graph = trace_in_mode(model, tracer_kwargs, concrete_args)
            wanted = select(graph, request, f"{class_name} ({'train' if training else 'eval'})")
            graphs.append(prune(graph, wanted, model))
            names.append(names_of(graph))
    if not suppress_diff_warning:
        warn_of_differences(*names)
    return DualGraphModule(model, graphs[0], graphs[1], class_name)


def _requests(
    return_nodes: Request | None, train_return_nodes: Request | None, eval_return_nodes: Request | None
) -> tuple[dict[str, str], dict[str, str]]:
    if (train_return_nodes is None) != (eval_return_nodes is None):
        raise RequestError("train_return_nodes and eval_return_nodes must be given together")
    if (return_nodes is None) == (train_return_nodes is None):
        raise RequestError(
            "give either return_nodes, or train_return_nodes and eval_return_nodes; "
            + ("nothing was requested" if return_nodes is None else "both were given")
        )
    if return_nodes is not None:
        request = as_request(return_nodes, "return_nodes")
        return request, request
    return (
        as_request(train_return_nodes, "train_return_nodes"),
        as_request(eval_return_nodes, "eval_return_nodes"),
    )
