"""Build a module that returns chosen values from inside a model, and runs only what they need."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

from torch import nn

from featx.errors import ArgumentTypeError, DrawnAwayError, RequestError
from featx.features.adaptive import AdaptiveExtractor
from featx.features.cases import Cases
from featx.features.decisions import decides_by_inputs
from featx.features.dual import DualGraphModule
from featx.features.edits import Edit, Edits
from featx.features.examples import Example
from featx.features.feature import Feature, process, with_heads
from featx.features.info import FeatureInfos, infos_of
from featx.features.nodes import names_of, warn_of_differences
from featx.features.prune import prune
from featx.features.request import Request, as_request
from featx.features.tracing import ModelTracing, TracedModel, TracerName, check_model
from featx.features.untraced import untraced_graph
from featx.ir.graph import Graph
from featx.tracing.checks.free_sizes import FreeDims
from featx.tracing.example.tracer import CheckSizes

# A node by its name, a pattern of names, a module of the model, or a class of modules.
Name = str | nn.Module | type[nn.Module]
Nodes = Mapping[Any, str | Feature] | Sequence[Name]


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

    The model runs on tensors without values: twice, about six times more at other sizes if it goes by sizes, and three
    times more if it asks for a dtype; fewer times in the other mode. It runs with values only where it asks for values
    of large inputs or of weights. O(nodes + modules) each; `logging.getLogger("featx")` tells of each run. A model that
    can be traced in one mode only gives an extractor for that mode, which raises `TraceError` where it is run in the
    other.

    Args:
        model: where the values come from.
        return_nodes: a dict from node names to keys of the result, or a list of names that are the keys too. See
            `get_graph_node_names`; the path of a module means what its last call returned, or where it is a name in
            that list, that call. "output" is what the model returns. A name may also be a pattern (`"blocks.*"`,
            `"layer[34].*.conv2"`; `*` is one part of a path, `**` any number of them), a module of the model, or a
            class of modules; of what they stand for, modules that do not run are left out. In the keys of these `*`
            is what was matched: `{"layer*": "C*"}`. A `Feature` in the place of a key says what is done to the
            value. The result has the order of the request.
        train_return_nodes: what train mode returns, where the modes differ; together with `eval_return_nodes`.
        eval_return_nodes: what eval mode returns.
        tracer_kwargs: as for `get_graph_node_names`.
        suppress_diff_warning: do not warn when the modes have different nodes.
        concrete_args: inputs that are fixed to a value, by name.
        example_inputs: inputs to follow through the model: a tensor, a tuple of positional ones or a dict by name. By
            default what the model declares (timm, transformers, torchvision) or its first layer suggests.
        tracer: "example" follows the example, "symbolic" runs the model on symbols; "auto" does the first where there
            is an example and the second where there is none.
        check_sizes: which dimensions of the inputs may have other lengths than in the example, where the model goes by
            sizes: "full" tries all of them, "batch" the first one, "none" none of them, which runs the model least.
            Other lengths of those that are not tried raise `SpecializationError`.
        adaptive: whether to trace again for an input for which no graph so far holds, instead of raising
            `SpecializationError`, and keep one graph for each case. By default an extractor does so where the model
            takes indices, as text models do, or decides by the values of inputs: the first batch with padding takes as
            long as a trace. It keeps the model for that, and raises where an input needs parts of the model that no
            feature needed so far. With True all extractors do so, for other sizes too, and have all parts of the
            model; see `AdaptiveExtractor`.
        edits: what the model goes on with in place of values that it has computed, by name as in `return_nodes`: a
            function of the value, which must not write it, a tensor of the same shape, or `featx.zero`. A requested
            value that is edited is returned as the edit gives it. The model itself stays as it is.

    Raises:
        NodeNameError: a name does not exist in a mode; the message has close matches.
        RequestError: nothing is requested, too much is, or one key is given twice.
        ArgumentTypeError: `model` is not a module, or the request is neither a dict nor a list.
        TraceError: the model cannot be traced in either mode, or in one where the requests are given for each; the
            message says where and what to do.
    """
    requests = _requests(model, return_nodes, train_return_nodes, eval_return_nodes)
    is_lenient = return_nodes is not None
    options = _Options(
        tracer_kwargs, concrete_args, tracer, check_sizes, is_lenient, suppress_diff_warning, adaptive, edits
    )
    if not adaptive:
        return _build(model, requests, options, example_inputs)
    if tracer == "symbolic":
        raise ArgumentTypeError("adaptive=True follows each new input; tracer='symbolic' follows none")
    heads = [each.apply for request in requests.values() for each in request.features.values()]
    if any(isinstance(head, nn.Module) for head in heads):
        raise ArgumentTypeError(
            "an extractor with adaptive=True has the parts of the model alone, so a Feature cannot apply a module; "
            "call the module on what the extractor returns"
        )
    first = _build(model, requests, options, example_inputs)
    options = replace(options, suppress_diff_warning=True)
    return AdaptiveExtractor(model, first, functools.partial(_build, model, requests, options))


@dataclass(frozen=True)
class _Options:
    """How an extractor is built: see `create_feature_extractor`; `is_lenient` lets one mode be left out."""

    tracer_kwargs: Mapping[str, Any] | None
    concrete_args: dict[str, Any] | None
    tracer: TracerName
    check_sizes: CheckSizes
    is_lenient: bool
    suppress_diff_warning: bool
    adaptive: bool | None
    edits: Mapping[Any, Edit] | None


def _build(model: nn.Module, requests: dict[bool, Request], options: _Options, example_inputs: Any) -> DualGraphModule:
    tracing = _tracing(model, options, example_inputs)
    try:
        modes = {training: _trace_mode(tracing, request, training) for training, request in requests.items()}
    finally:
        tracing.drop()
    _settle(modes[model.training], modes[not model.training], is_lenient=options.is_lenient)
    present = None
    if tracing.flags() != modes[model.training].flags:
        # Somebody has put parts of the model into another mode than the whole.
        tracing.training = None
        present = _Mode(model.training, {})
        present.finish(tracing.wanted(requests[model.training], "as it is now"), tracing)
    if not options.suppress_diff_warning and not any(mode.error for mode in modes.values()):
        warn_of_differences(modes[True].names, modes[False].names, level=4)
    extractor = DualGraphModule(
        with_heads(model, {**modes[True].features, **modes[False].features}),
        modes[True].graph,
        modes[False].graph,
        type(model).__name__,
        present_graph=None if present is None else present.graph,
        exceptions={training: mode.exceptions for training, mode in modes.items()},
        infos={training: mode.infos for training, mode in modes.items()},
        cases=_cases(model, requests, options) if _is_adapted(modes.values(), options) else None,
    )
    extractor.meta["free_dims"] = {training: mode.free_dims for training, mode in modes.items()}
    return extractor


def _tracing(model: nn.Module, options: _Options, example_inputs: Any) -> ModelTracing:
    tracing = ModelTracing(
        model, options.tracer_kwargs, options.concrete_args, example_inputs, options.tracer, options.check_sizes
    )
    tracing.edits = None if options.edits is None else Edits(options.edits, model)
    return tracing


def _is_adapted(modes: Iterable[_Mode], options: _Options) -> bool:
    return options.adaptive is None and any(decides_by_inputs(mode.graph) for mode in modes if mode.free_dims)


def _cases(model: nn.Module, requests: dict[bool, Request], options: _Options) -> Cases:
    return Cases(model, functools.partial(_graph_of_case, requests, options))


def _graph_of_case(
    requests: dict[bool, Request], options: _Options, model: nn.Module, training: bool, example: Example
) -> Graph:
    tracing = _tracing(model, options, example)
    try:
        mode = _trace_mode(tracing, requests[training], training)
    finally:
        tracing.drop()
    if mode.error is not None:
        raise mode.error
    return mode.graph


@dataclass
class _Mode:
    """What became of a model in train mode or in eval mode.

    Attributes:
        training: which of the two.
        flags: the mode of each submodule, by path.
        graph: what computes the requested values.
        names: those of all nodes of the trace.
        free_dims: which dimensions of the inputs may differ.
        infos: what is returned.
        features: what is done to the values, by key.
        error: why it could not be traced, if it could not.
    """

    training: bool
    flags: dict[str, bool]
    graph: Graph = field(default_factory=Graph)
    names: list[str] = field(default_factory=lambda: list[str]())
    free_dims: FreeDims | None = None
    infos: FeatureInfos = field(default_factory=lambda: FeatureInfos(()))
    features: dict[str, Feature] = field(default_factory=lambda: dict[str, Feature]())
    error: Exception | None = None

    def finish(self, traced: TracedModel, tracing: ModelTracing) -> None:
        """Take what a trace found: the graph of what is wanted alone, with what is done to that."""
        self.names = names_of(traced.graph)
        wanted = traced.wanted
        if tracing.edits is not None:
            wanted = tracing.edits.make(traced.graph, wanted, traced.request)
        self.graph = prune(traced.graph, wanted, tracing.model_in_mode())
        self.free_dims = traced.free_dims
        infos = infos_of(wanted, traced.request, tracing.model, tracing.image)
        self.features = {key: each for key, each in traced.request.features.items() if key in wanted}
        processed = process(self.graph, self.features, {info.key: info for info in infos})
        self.infos = FeatureInfos([processed.get(info.key, info) for info in infos])

    @property
    def exceptions(self) -> list[str]:
        """The paths of the submodules that the model itself keeps in the other mode."""
        return [path for path, training in self.flags.items() if training != self.training]


def _trace_mode(tracing: ModelTracing, request: Request, training: bool) -> _Mode:
    tracing.training = training
    mode = _Mode(training, tracing.flags(training))
    try:
        traced = tracing.wanted(request, _name_of(training))
    except DrawnAwayError as error:
        mode.error = error
    except RequestError:
        raise
    except Exception as error:  # the model's own too: a batch of one sample, targets that are missing
        mode.error = error
    else:
        mode.finish(traced, tracing)
    return mode


def _settle(present: _Mode, other: _Mode, *, is_lenient: bool) -> None:
    """Let a mode that could not be traced raise when it runs.

    Where that is not lenient, both are such, or a name is missing in the present one, raise now.
    """
    error = present.error or other.error
    if error is None:
        return
    if not is_lenient or (present.error and other.error) or isinstance(present.error, RequestError):
        raise error
    failed, traced = (present, other) if present.error else (other, present)
    failed.graph = untraced_graph(traced.graph, error, _name_of(failed.training))


def _name_of(training: bool) -> str:
    return "train" if training else "eval"


def _requests(
    model: nn.Module, return_nodes: Nodes | None, train_return_nodes: Nodes | None, eval_return_nodes: Nodes | None
) -> dict[bool, Request]:
    # By mode: True is train mode.
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
