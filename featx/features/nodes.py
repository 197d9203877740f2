"""List the names under which the values inside a model can be asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from featx.features.building.each_mode import in_each_mode
from featx.features.building.tracing import ModelTracing
from featx.features.building.tracing_options import TracerName, TracingOptions
from featx.features.requests.attention import with_probabilities
from featx.features.requests.select import names_of


def get_graph_node_names(
    model: nn.Module,
    tracer_kwargs: Mapping[str, Any] | None = None,
    suppress_diff_warning: bool = False,
    concrete_args: dict[str, Any] | None = None,
    *,
    example_inputs: Any = None,
    tracer: TracerName = "auto",
    attention_probabilities: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the names of the nodes of `model` in execution order, in train and in eval mode.

    A name is the path of the module that made the node and what it does: `layer1.0.conv1` is a leaf module,
    `layer1.0.add` a function that `layer1.0` calls, `layer1.0.relu_2` the third call of one module or function. Any of
    them, and any prefix such as `layer1`, can be given to `create_feature_extractor`.

    A replica of the model runs once, on tensors without values, and a second time if its code asks in which mode it
    is; the model is only read. O(nodes + modules) each.
    Where it can be traced in one mode only, the list of the other is empty, and a warning says why. Where forward can
    be followed up to some line alone, as one that goes on with numpy, the names up to there are listed, with a warning.

    Args:
        model: what to trace.
        tracer_kwargs: `leaf_modules`, `autowrap_modules`, `autowrap_functions` and `param_shapes_constant` of
            `FeatureTracer`. Modules of torch.nn and torchvision.ops are leaves always.
        suppress_diff_warning: do not warn when the two lists differ, one is empty, or a part of forward is left out.
        concrete_args: inputs that are fixed to a value, by name.
        example_inputs: as for `create_feature_extractor`.
        tracer: as for `create_feature_extractor`.
        attention_probabilities: list `....probabilities` too, after each call of fused attention: what it weighs the
            values with, which is computed if it is asked for.

    Raises:
        ArgumentTypeError: `model` is not a module.
        TraceError: the model cannot be traced in either mode; the message says where and what to do.
    """
    options = TracingOptions(
        tracer_kwargs=tracer_kwargs, concrete_args=concrete_args, example_inputs=example_inputs, tracer=tracer
    )
    tracing = ModelTracing(model, options)
    names, errors = in_each_mode(tracing, lambda: names_of(tracing.graph(may_end_early=True)))
    if len(errors) == 2:
        raise errors[model.training]
    if attention_probabilities:
        modules = dict(model.named_modules())
        names = {training: list(with_probabilities(each, modules)) for training, each in names.items()}
    if not suppress_diff_warning:
        for end in dict.fromkeys(tracing.ends.values()):
            warnings.warn(end.describe(model), stacklevel=2)
        if errors:
            _warn_of_failure(errors)
        else:
            warn_of_differences(names[True], names[False])
    return list(names.get(True, ())), list(names.get(False, ()))


def _warn_of_failure(errors: Mapping[bool, Exception]) -> None:
    for training, error in errors.items():
        mode = "train" if training else "eval"
        warnings.warn(
            f"the model cannot be traced in {mode} mode, for which no names are listed: {type(error).__name__}: "
            f"{error}",
            stacklevel=3,
        )


def warn_of_differences(train_names: Sequence[str], eval_names: Sequence[str], level: int = 3) -> None:
    """Warn if a model has other nodes in train mode than in eval mode, as torchvision does.

    `level` says whose line it is: 3 is the caller of the caller.
    """
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
        stacklevel=level,
    )


def _is_subsequence(part: Sequence[str], whole: Sequence[str]) -> bool:
    remaining = iter(whole)
    return all(name in remaining for name in part)
