"""Build an extractor from a model and requests: trace each mode, cut out what is requested, and put both together."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from featx.errors import DrawnAwayError, NodeNameError, RequestError, TraceError
from featx.examples import Example
from featx.features.building.case_state import (
    call_sites_of,
    left_by,
    note_call_sites,
    note_left,
    state_use_of,
    tensors_left_out,
)
from featx.features.building.cases import Cases
from featx.features.building.decisions import asks_for_device, branches_on_inputs, note_random_decisions
from featx.features.building.feature_tracer import check_model
from featx.features.building.item_names import names_of_items
from featx.features.building.left_reads import read_of
from featx.features.building.own_train import looked_into, opened_writer
from featx.features.building.prune import prune
from featx.features.building.raising_graph import raising_graph
from featx.features.building.reachable import share_reachable_modules
from featx.features.building.requested import RequestedNodes, TracedModel
from featx.features.building.tracing import ModelTracing
from featx.features.building.tracing_options import TracerName, TracingOptions
from featx.features.describing.info import FeatureInfos, infos_of
from featx.features.describing.other_sizes import OtherSizes
from featx.features.dual import DualGraphModule
from featx.features.nodes import warn_of_differences
from featx.features.own_conversion import note_own_conversion
from featx.features.requests.edits import Edit, Edits, note_shapes_behind_edits
from featx.features.requests.feature import Feature
from featx.features.requests.heads import head_path, modules_of, with_heads
from featx.features.requests.processing import process, refuse_maps_of_scaled_images
from featx.features.requests.request import Request
from featx.features.requests.select import IN_ONE_MODE, names_of
from featx.features.requests.starts import Starts, stand_in
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.example.tracer import CheckSizes
from featx.tracing.nodes.naming import CallSite
from featx.tracing.sizes.outcomes import FreeDims


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an extractor is built: see `create_feature_extractor`.

    `is_lenient` lets one mode be left out, `kind` is the class of the extractor, and `is_list` lets it return a list.
    `keeps_cases` lets it trace the model again where no graph holds, whatever the model decides by. `call_sites` says
    which calls in the code of the model names meant in an earlier graph, by mode.
    """

    tracer_kwargs: Mapping[str, Any] | None = None
    concrete_args: dict[str, Any] | None = None
    tracer: TracerName = "auto"
    check_sizes: CheckSizes = "full"
    is_lenient: bool = True
    suppress_diff_warning: bool = False
    adaptive: bool | None = None
    edits: Mapping[Any, Edit] | None = None
    inputs: Any = None
    kind: type[DualGraphModule] = DualGraphModule
    is_list: bool = False
    keeps_cases: bool = False
    call_sites: Mapping[bool, Mapping[str, CallSite]] = field(default_factory=dict)


def build(
    model: nn.Module,
    requests: dict[bool, Request],
    options: Options,
    example_inputs: Any,
    earlier_dims: Mapping[bool, FreeDims | None] | None = None,
) -> DualGraphModule:
    """Return an extractor for what is requested in each mode; see `create_feature_extractor`.

    `earlier_dims` is what one for other inputs has found of their dimensions, by mode, which saves runs of the model.
    """
    tracing = _tracing(model, options, example_inputs, earlier_dims or {})
    try:
        modes = _trace_modes(tracing, requests, options)
        _keep_writes_for_other_mode(modes, tracing, options)
    finally:
        tracing.drop()
    _check_state_between(modes, tracing, model.training)
    _check_own_train(modes, model)
    _handle_untraceable_mode(modes[model.training], modes[not model.training], is_lenient=options.is_lenient)
    present = None
    if tracing.flags() != modes[model.training].flags:
        # Somebody has put parts of the model into another mode than the whole.
        present = _trace_as_it_is(tracing, requests[model.training], options)
    if not options.suppress_diff_warning and not any(mode.error for mode in modes.values()):
        warn_of_differences(modes[True].names, modes[False].names, level=4)
    free_dims = {training: mode.free_dims for training, mode in modes.items()}
    features = {each.key: each for each in (*modes[True].features, *modes[False].features)}
    edited = {} if tracing.edits is None else tracing.edits.modules()
    further = with_call_sites(options, {training: mode.graph for training, mode in modes.items() if mode.traced})
    extractor = options.kind(
        with_heads(model, {**modules_of(features.values()), **edited}),
        modes[True].graph,
        modes[False].graph,
        type(model).__name__,
        present_graph=None if present is None else present.graph,
        exceptions={training: mode.exceptions for training, mode in modes.items()},
        infos={training: mode.infos for training, mode in modes.items()},
        cases=Cases(model, CaseTracer(requests, further, tracing.inputs.used, free_dims), tracing.inputs.used)
        if _is_adapted(modes.values(), options)
        else None,
    )
    share_reachable_modules(extractor, model)
    note_own_conversion(extractor, model, (mode.graph for mode in modes.values()))
    if options.inputs is None and tracing.inputs.used is not None:
        extractor.meta["example"] = tracing.inputs.used.without_values()
    extractor.meta["free_dims"] = free_dims
    return extractor


def with_call_sites(options: Options, graphs: Mapping[bool, Graph]) -> Options:
    """Return options for further graphs in which names mean the calls that they mean in these, by mode."""
    return replace(options, call_sites={training: call_sites_of(graph) for training, graph in graphs.items()})


def _keep_writes_for_other_mode(modes: Mapping[bool, _Mode], tracing: ModelTracing, options: Options) -> None:
    """Let the graph of each mode write the tensors of the model that only the graph of the other one reads."""
    uses = {training: state_use_of(mode.graph) for training, mode in modes.items() if mode.traced is not None}
    for training, use in uses.items():
        with tracing.in_mode(training):
            root = tracing.model_in_mode()
            needed = set[int]().union(*(tensors_left_out(root, use, other) for other in uses.values()))
            if needed:
                modes[training].complete(tracing, options, frozenset(needed))


def _tracing(
    model: nn.Module,
    options: Options,
    example_inputs: Any,
    earlier_dims: Mapping[bool, FreeDims | None],
    opened: frozenset[str] = frozenset(),
) -> ModelTracing:
    how = TracingOptions(
        tracer_kwargs=options.tracer_kwargs,
        concrete_args=options.concrete_args,
        example_inputs=example_inputs,
        tracer=options.tracer,
        check_sizes=options.check_sizes,
        edits=None if options.edits is None else Edits(options.edits, check_model(model)),
        starts=None if options.inputs is None else Starts(options.inputs, check_model(model)),
        opened=opened,
        makes_values=True,
        earlier_dims=earlier_dims,
        call_sites=options.call_sites,
    )
    return ModelTracing(model, how)


def _is_adapted(modes: Iterable[_Mode], options: Options) -> bool:
    if options.keeps_cases:
        return True
    if options.adaptive is not None:
        return False
    return any(branches_on_inputs(mode.graph) or asks_for_device(mode.graph) for mode in modes if mode.free_dims)


class CaseTracer:
    """Traces a model for inputs that no graph fits. What the first example has chosen, such as no cache, holds.

    Args:
        requests: what is requested, by mode.
        options: how the extractor is built.
        first: the inputs of the first graphs.
        free_dims: which of their dimensions are free, by mode.
    """

    def __init__(
        self,
        requests: dict[bool, Request],
        options: Options,
        first: Example | None,
        free_dims: Mapping[bool, FreeDims | None],
    ) -> None:
        self._requests = requests
        self._options = options
        self._chosen = {} if first is None else first.options()
        self._dims = free_dims

    def graph(self, model: nn.Module, training: bool | None, example: Example, opened: frozenset[str]) -> Graph:
        """Return the graph of the model in a mode, for these inputs; it looks into the modules with these paths.

        `training` is None for the modes that its modules are in.
        """
        with self._tracing(model, example, opened) as tracing:
            if training is None:
                return _trace_as_it_is(tracing, self._requests[model.training], self._options).graph
            mode = _trace_mode(tracing, self._requests[training], training, self._options)
        if mode.error is not None:
            raise mode.error
        return mode.graph

    def is_unaffected(
        self, model: nn.Module, training: bool, example: Example, earlier: Example, *, is_in_mode: bool,
        is_same_mode: bool,
    ) -> bool:  # fmt: skip
        """Say whether forward does the same with `example`, whether or not it had a call with `earlier` before.

        `training` is the mode of the new graph; see `IsUnaffected`.
        """
        earlier = earlier.with_options(self._chosen, model.forward)
        mode = training if is_in_mode else not training
        with self._tracing(model, example, frozenset()) as tracing, tracing.in_mode(mode):
            return tracing.does_the_same_after(earlier, switches_mode=not is_same_mode)

    @contextmanager
    def _tracing(self, model: nn.Module, example: Example, opened: frozenset[str]) -> Generator[ModelTracing]:
        example = example.with_options(self._chosen, model.forward)
        tracing = _tracing(model, self._options, example, self._dims, opened)
        try:
            yield tracing
        finally:
            tracing.drop()


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
        features: what is done to the values.
        error: why it could not be traced, if it could not.
    """

    training: bool
    flags: dict[str, bool]
    graph: Graph = field(default_factory=Graph)
    names: list[str] = field(default_factory=lambda: list[str]())
    free_dims: FreeDims | None = None
    infos: FeatureInfos = field(default_factory=lambda: FeatureInfos(()))
    features: list[Feature] = field(default_factory=lambda: list[Feature]())
    error: Exception | None = None
    traced: TracedModel | None = None
    _requested: Mapping[str, Node] = field(default_factory=dict)

    def finish(self, traced: TracedModel, tracing: ModelTracing, options: Options) -> None:
        """Take what a trace found: the graph of what is requested alone, with what is done to that."""
        self.names = names_of(traced.graph)
        requested, starts = traced.requested, tracing.starts
        if tracing.edits is not None:
            kept = traced.request if starts is None else starts.with_names(traced.request)
            requested = tracing.edits.make(traced.graph, requested, kept)
        if starts is not None:
            root = tracing.model_in_mode()
            requested = starts.make(traced.graph, requested, traced.request, root, traced.free_dims)
        self.traced, self._requested = traced, requested
        self.complete(tracing, options)

    def complete(self, tracing: ModelTracing, options: Options, read_elsewhere: frozenset[int] = frozenset()) -> None:
        """Take of the graph what is requested, and writes into what another graph reads; see `prune`."""
        traced, requested = self.traced, self._requested
        assert traced is not None
        self.graph = prune(traced.graph, requested, tracing.model_in_mode(), read_elsewhere)
        note_left(self.graph, traced.left)
        note_call_sites(self.graph, traced.call_sites)
        note_random_decisions(self.graph)
        if tracing.edits is not None:
            tracing.edits.check_effect(self.graph)
            tracing.edits.call_modules(self.graph, head_path)
        self.free_dims = traced.free_dims if tracing.starts is None else None
        image = tracing.inputs.image
        root = with_heads(tracing.model_in_mode(), {} if tracing.edits is None else tracing.edits.modules())
        other = tracing.other_sizes(self.graph, root)
        if tracing.edits is not None:
            given = (
                other if tracing.starts is None else OtherSizes(lambda: self.graph, root, stand_in(self.graph), None)
            )
            note_shapes_behind_edits(requested, {} if given is None else given.of_example)
        infos = infos_of(requested, traced.request, tracing.known_model, tracing.inputs.images, other)
        features = {key: each for key, each in traced.request.features.items() if key in requested}
        self.features = [each for several in features.values() for each in several]
        if other is not None and image is not None and image.name is not None:
            refuse_maps_of_scaled_images(features, infos, other)
        processed = process(
            self.graph, features, {info.key: info for info in infos}, image, partial(names_of_items, tracing)
        )
        self.infos = FeatureInfos(list(processed.values()))
        if options.is_list:
            output = self.graph.output_node()
            output.args = ([output.args[0][info.key] for info in self.infos],)

    @property
    def exceptions(self) -> list[str]:
        """The paths of the submodules that the model itself keeps in the other mode."""
        return [path for path, training in self.flags.items() if training != self.training]


def _trace_modes(tracing: ModelTracing, requests: Mapping[bool, Request], options: Options) -> dict[bool, _Mode]:
    modes: dict[bool, _Mode] = {}
    for training, request in requests.items():
        try:
            modes[training] = _trace_mode(tracing, request, training, options)
        except NodeNameError as error:
            if modes or not _is_missing_too(tracing, requests[not training], not training, error.name):
                raise
            # Nothing that differs between the modes.
            text = str(error).replace(f" ({_name_of(training)})", "", 1).replace(IN_ONE_MODE, "")
            raise NodeNameError(text, error.name) from error.__cause__
    return modes


def _is_missing_too(tracing: ModelTracing, request: Request, training: bool, name: str) -> bool:
    try:
        with tracing.in_mode(training):
            RequestedNodes(tracing, _name_of(training)).find(request)
    except NodeNameError as error:
        return error.name == name
    except Exception:  # the model's own too
        return False
    return False


def _trace_mode(tracing: ModelTracing, request: Request, training: bool, options: Options) -> _Mode:
    mode = _Mode(training, tracing.flags(training))
    try:
        with tracing.in_mode(training):
            traced = RequestedNodes(tracing, _name_of(training)).find(request)
    except DrawnAwayError as error:
        mode.error = error
    except RequestError:
        raise
    except Exception as error:  # the model's own too: a batch of one sample, targets that are missing
        mode.error = error
    else:
        try:
            with tracing.in_mode(training):
                mode.finish(traced, tracing, options)
        except RequestError as error:
            # In train mode more may follow from other inputs: the auxiliary heads of GoogLeNet.
            if options.inputs is None or training is tracing.model.training:
                raise
            mode.error = error
    return mode


def _trace_as_it_is(tracing: ModelTracing, request: Request, options: Options) -> _Mode:
    """Trace the model in the modes that its modules are in."""
    mode = _Mode(tracing.model.training, {})
    mode.finish(RequestedNodes(tracing, "as it is now").find(request), tracing, options)
    return mode


def _check_state_between(modes: Mapping[bool, _Mode], tracing: ModelTracing, present: bool) -> None:
    """Let the mode that the model is not in count as untraceable, if one reads in attributes what the other leaves."""
    if any(mode.error for mode in modes.values()):
        return
    for writing, reading in ((True, False), (False, True)):
        left = left_by(modes[writing].graph) - left_by(modes[reading].graph)
        # A trace of the other mode tells by itself of which length its own caches are.
        left = [each for each in left if not each.is_for_one_length]
        with tracing.in_mode(reading):
            read = read_of(left, tracing) if left else None
        if read is not None:
            modes[not present].error = TraceError(
                f"forward stores what it computes in {read} in {_name_of(writing)} mode, "
                f"and reads it in {_name_of(reading)} mode, and a graph stores nothing there. To go on, write it into "
                "a buffer in place (self.center.copy_(value)); in the other mode alone, the extractor is exact"
            )
            return


def _check_own_train(modes: Mapping[bool, _Mode], model: nn.Module) -> None:
    """Let the mode that the model is not in count as untraceable, if an opened module writes tensors in `train`."""
    if any(mode.error for mode in modes.values()):
        return
    path = opened_writer(model, looked_into(mode.graph for mode in modes.values()))
    if path is not None:
        modes[not model.training].error = TraceError(
            f"train() of '{path}' writes tensors of the model, and an extractor that looks into that module does not "
            "call it. To go on, request that module as a whole, or make the extractor with adaptive=True; in the "
            f"present mode, {_name_of(model.training)}, this one is exact"
        )


def _handle_untraceable_mode(present: _Mode, other: _Mode, *, is_lenient: bool) -> None:
    """Let a mode that could not be traced raise when it runs.

    Where that is not lenient, both are such, a name is missing in the present one, or the present one is eval mode, in
    which features are mostly wanted, raise now.
    """
    error = present.error or other.error
    if error is None:
        return
    if isinstance(present.error, TraceError) and not other.error and not present.training:
        error.add_note("In train mode the model can be traced: call model.train() first, if that is what you want.")
    fails_now = present.error is not None and (isinstance(error, RequestError) or not present.training)
    if fails_now or not is_lenient or (present.error and other.error):
        raise error
    failed, traced = (present, other) if present.error else (other, present)
    failed.graph = raising_graph(traced.graph, error, _name_of(failed.training))


def _name_of(training: bool) -> str:
    return "train" if training else "eval"
