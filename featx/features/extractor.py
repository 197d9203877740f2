"""Build a module that returns chosen values from inside a model, and runs only what they need."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import nn

from featx.errors import ArgumentTypeError, RequestError
from featx.examples import Example
from featx.features.adaptive import AdaptiveExtractor
from featx.features.building.build import CaseTracer, Options, build, with_call_sites
from featx.features.building.feature_tracer import check_model
from featx.features.building.tracing_options import TracerName
from featx.features.dual import DualGraphModule
from featx.features.requests.edits import Edit
from featx.features.requests.feature import Feature
from featx.features.requests.request import Request, as_request
from featx.tracing.example.tracer import CheckSizes
from featx.tracing.inputs.given_example import given_example

# A node by its name, a pattern of names, a module of the model, or a class of modules.
Name = str | nn.Module | type[nn.Module]
Nodes = Mapping[Any, str | Feature | Sequence[str | Feature]] | Sequence[Name]


@overload
def create_feature_extractor(
    model: nn.Module,
    return_nodes: Nodes | None = None,
    train_return_nodes: Nodes | None = None,
    eval_return_nodes: Nodes | None = None,
    tracer_kwargs: Mapping[str, Any] | None = None,
    suppress_diff_warning: bool = False,
    concrete_args: dict[str, Any] | None = None,
    *,
    example_inputs: Any = None,
    tracer: TracerName = "auto",
    adaptive: Literal[False] | None = None,
    check_sizes: CheckSizes = "full",
    edits: Mapping[Any, Edit] | None = None,
    inputs: Mapping[Any, str] | Sequence[Name] | None = None,
) -> DualGraphModule: ...


@overload
def create_feature_extractor(
    model: nn.Module,
    return_nodes: Nodes | None = None,
    train_return_nodes: Nodes | None = None,
    eval_return_nodes: Nodes | None = None,
    tracer_kwargs: Mapping[str, Any] | None = None,
    suppress_diff_warning: bool = False,
    concrete_args: dict[str, Any] | None = None,
    *,
    example_inputs: Any = None,
    tracer: TracerName = "auto",
    adaptive: bool | None,
    check_sizes: CheckSizes = "full",
    edits: Mapping[Any, Edit] | None = None,
    inputs: Mapping[Any, str] | Sequence[Name] | None = None,
) -> DualGraphModule | AdaptiveExtractor: ...


def create_feature_extractor(
    model: nn.Module,
    return_nodes: Nodes | None = None,
    train_return_nodes: Nodes | None = None,
    eval_return_nodes: Nodes | None = None,
    tracer_kwargs: Mapping[str, Any] | None = None,
    suppress_diff_warning: bool = False,
    concrete_args: dict[str, Any] | None = None,
    *,
    example_inputs: Any = None,
    tracer: TracerName = "auto",
    adaptive: bool | None = None,
    check_sizes: CheckSizes = "full",
    edits: Mapping[Any, Edit] | None = None,
    inputs: Mapping[Any, str] | Sequence[Name] | None = None,
) -> DualGraphModule | AdaptiveExtractor:
    """Return a module that computes the requested values of `model`, as a dict, and nothing that they do not need.

    A value is what the node had when it was computed, even where the model overwrites it later. Weights are shared
    with `model`, those that are not needed are dropped, and the keys of the state dict stay the model's. `train()` and
    `eval()` switch between the graphs of the two modes, and set the modes of submodules as they do for `model`; until
    then the extractor computes what the model does in its present modes. `model` is as before afterwards, also after
    an error.

    Modules that no requested value lies inside are kept whole: their class, hooks and control flow stay. What the
    others decide in Python is checked at run time, and `extractor.free_dims` says which dimensions of the inputs are
    free. Cast and move the extractor itself: `extractor.half()` computes what `model.half()` does, or raises where the
    model does something else in that dtype.

    The model runs on tensors without values: twice, about six times more at other sizes if it depends on sizes, and
    three or four times more if it asks for a dtype; fewer times in the other mode. It runs with values only where it
    asks for values of large inputs or of weights. O(nodes + modules) each; `logging.getLogger("featx")` logs each run.
    A model that can be traced in one mode only gives an extractor for that mode, which raises `TraceError` where it
    is run in the other.

    Args:
        model: where the values come from.
        return_nodes: a dict from node names to keys of the result, or a list of names that are the keys too. See
            `get_graph_node_names`; the path of a module means what its last call returned, or where it is a name in
            that list, that call. "output" is what the model returns, if no child or input has that name; `model` itself
            is that in any case. A name may also be a pattern (`"blocks.*"`, `"layer[34].*.conv2"`; `*` is one part of
            a path, `**` any number of them), a module of the model, or a class of modules; of what they stand for,
            modules that do not run are left out. In the keys of these `*` is what was matched: `{"layer*": "C*"}`. A
            `Feature` in the place of a key says what is done to the value, and a list of keys and features returns it
            several times. The result has the order of the request.
        train_return_nodes: what train mode returns, where the modes differ; together with `eval_return_nodes`.
        eval_return_nodes: what eval mode returns.
        tracer_kwargs: as for `get_graph_node_names`.
        suppress_diff_warning: do not warn when the modes have different nodes.
        concrete_args: inputs that are fixed to a value, by name.
        example_inputs: inputs to follow through the model: a tensor, a tuple of positional ones or a dict by name. By
            default what the model declares (timm, transformers, torchvision) or its first layer suggests.
        tracer: "example" follows the example, "symbolic" runs the model on symbols; "auto" does the first where there
            is an example and the second where there is none.
        check_sizes: which dimensions of the inputs may have other lengths than in the example, where the model
            depends on sizes: "full" tries all of them, "batch" the first one, "none" none of them, which runs the model
            least. Other lengths of those that are not tried raise `SpecializationError`.
        adaptive: whether to trace again for an input for which no graph so far holds, instead of raising
            `SpecializationError`, and keep one graph for each case. By default an extractor does so where the model
            takes indices, as text models do, or decides by the values of inputs: the first batch with padding takes as
            long as a trace. It keeps the model for that, and raises where an input needs parts of the model that no
            feature needed so far. With True all extractors do so, for other sizes too, and have all parts of the
            model; see `AdaptiveExtractor`.
        edits: what the model goes on with in place of values that it has computed, by name as in `return_nodes`: a
            function of the value, which must not write it, a module, which becomes a part of the extractor, a tensor
            of the same shape or with one place along a dimension, such as a mean, or `featx.zero`. The path of a module
            means what each of its calls returns, as for a forward hook; `relu_1` is one call. A requested value that is
            edited is returned as the edit gives it. The model itself stays as it is.
        inputs: what the extractor takes in place of the inputs of the model, to start in the middle: names as in
            `return_nodes`, such as `["layer2"]`, or a dict from names to those of the parameters. What computes these
            values is left out. An error names what has to be given too. `example_inputs` are those of the model.

    Raises:
        NodeNameError: a name does not exist in a mode; the message has close matches.
        RequestError: nothing is requested, too much is, or one key is given twice.
        ArgumentTypeError: `model` is not a module, or the request is neither a dict nor a list.
        TraceError: the model cannot be traced in either mode, or in one where the requests are given for each; the
            message says where and what to do.
    """
    requests = _requests(model, return_nodes, train_return_nodes, eval_return_nodes)
    options = Options(
        tracer_kwargs=tracer_kwargs,
        concrete_args=concrete_args,
        tracer=tracer,
        check_sizes=check_sizes,
        is_lenient=return_nodes is not None,
        suppress_diff_warning=suppress_diff_warning,
        adaptive=adaptive,
        edits=edits,
        inputs=inputs,
    )
    if inputs is not None and adaptive:
        raise ArgumentTypeError(
            "adaptive=True traces the model again, from its own inputs; leave it or inputs out. For batches with and "
            "without padding, make two extractors with inputs, each with such a batch as its example_inputs"
        )
    if inputs is not None:
        options = replace(options, adaptive=False)
    if not adaptive:
        return build(model, requests, options, example_inputs)
    if tracer == "symbolic":
        raise ArgumentTypeError("adaptive=True follows each new input; tracer='symbolic' follows none")
    heads = [each.apply for request in requests.values() for several in request.features.values() for each in several]
    if any(isinstance(head, nn.Module) for head in heads):
        raise ArgumentTypeError(
            "an extractor with adaptive=True has the parts of the model alone, so a Feature cannot apply a module; "
            "call the module on what the extractor returns"
        )
    if isinstance(edits, Mapping) and any(isinstance(edit, nn.Module) for edit in edits.values()):
        raise ArgumentTypeError(
            "an extractor with adaptive=True has the parts of the model alone, so an edit cannot be a module; give a "
            "function that calls the module"
        )
    first = build(model, requests, options, example_inputs)
    options = with_call_sites(options, {True: first.train_graph, False: first.eval_graph})
    options = replace(options, suppress_diff_warning=True)
    if example_inputs is None:
        example: Example | None = first.meta.get("example")
    else:
        example = given_example(model, example_inputs).without_large_values()
    cases = CaseTracer(requests, options, example, first.meta["free_dims"])
    # Inputs of eval mode may lack the targets that the loss of train mode needs.
    further = functools.partial(build, model, requests, replace(options, is_lenient=True))
    return AdaptiveExtractor(model, first, further, cases, example)


def _requests(
    model: nn.Module, return_nodes: Nodes | None, train_return_nodes: Nodes | None, eval_return_nodes: Nodes | None
) -> dict[bool, Request]:
    # By mode: True is train mode.
    if isinstance(train_return_nodes, torch.Tensor):
        raise ArgumentTypeError("inputs are given by name: create_feature_extractor(model, nodes, example_inputs=...)")
    if (train_return_nodes is None) != (eval_return_nodes is None):
        raise RequestError("train_return_nodes and eval_return_nodes must be given together")
    if (return_nodes is None) == (train_return_nodes is None):
        raise RequestError(
            "give either return_nodes, or train_return_nodes and eval_return_nodes; "
            + ("nothing was requested" if return_nodes is None else "both were given")
        )
    if return_nodes is not None:
        request = as_request(return_nodes, "return_nodes", check_model(model))
        return {True: request, False: request}
    return {
        True: as_request(train_return_nodes, "train_return_nodes", check_model(model)),
        False: as_request(eval_return_nodes, "eval_return_nodes", check_model(model)),
    }
