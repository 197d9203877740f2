"""Find the nodes that a request names in a trace of the model that is opened no further than they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from featx.errors import DrawnAwayError, NodeNameError, TraceError
from featx.examples import Example
from featx.features.building.decisions import branches_on_random
from featx.features.building.finder import Finder
from featx.features.building.tracing import ModelTracing
from featx.features.building.unknown_names import explain
from featx.features.requests.attention import FUSED_FUNCTIONS, Probabilities, with_probabilities
from featx.features.requests.opening import modules_to_open, names_match_full_trace
from featx.features.requests.request import OUTPUT, PROBABILITIES, Request
from featx.features.requests.select import names_of, select
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import did_you_mean
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.checks.checked_trace import trace_checked
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.nodes.naming import CallSite
from featx.tracing.side_effects.left import Left
from featx.tracing.sizes.outcomes import FreeDims
from featx.tracing.source.attributes import is_read, is_tested_for


@dataclass(frozen=True)
class TracedModel:
    """A model in one mode: its graph, the requested nodes by key, and which dimensions of its inputs are free.

    `request` has the names that were asked for, with their keys, and `left` the attributes in which forward has left
    what it computed. `call_sites` says where in the code of the model operations are that were asked for, by name.
    """

    graph: Graph
    request: Request
    requested: dict[str, Node]
    free_dims: FreeDims | None
    left: frozenset[Left]
    call_sites: Mapping[str, CallSite]


class RequestedNodes:
    """Finds requested nodes in traces of a model in one mode.

    Args:
        tracing: how the model is traced.
        mode: in which mode, in words.
    """

    def __init__(self, tracing: ModelTracing, mode: str) -> None:
        self._tracing = tracing
        self._model, self._modules = tracing.model, tracing.modules
        self._owner = f"{type(tracing.model).__name__} ({mode})"
        # What the last trace found out.
        self._free_dims: FreeDims | None = None
        self._left: set[Left] = set()
        self._is_whole = True

    def _all_names(self) -> list[str]:
        """Return the names of all nodes, up to a place where forward cannot be followed."""
        return names_of(self._tracing.graph(may_end_early=True))

    def find(self, request: Request) -> TracedModel:
        """Return the graph in which each requested name has a node, opened no further than that, and these nodes.

        Raises:
            NodeNameError: a name does not exist.
            TraceError: the model cannot be traced.
        """
        request = self._with_operations(request)
        missing: list[str] = []
        is_drawn_away = False
        for function in FUSED_FUNCTIONS:
            probabilities = Probabilities(request, self._modules, function)
            try:
                return self._requested(request, probabilities)
            except NodeNameError as error:
                if not probabilities.is_meant_by(error):
                    example, inputs = self._tracing.example(), self._tracing.inputs
                    explained = explain(error, self._owner, self._modules, example, inputs, self._all_names)
                    raise explained from error.__cause__
                missing = probabilities.names
                is_drawn_away = is_drawn_away or isinstance(error, DrawnAwayError)
        unfused = [name.removesuffix(PROBABILITIES) + "softmax" for name in missing]
        if set(unfused) & set(self._all_names()):
            raise NodeNameError(
                f"{self._owner} does not fuse attention: it computes the probabilities itself, and they are "
                f"{', '.join(map(repr, unfused))}"
            )
        raise (DrawnAwayError if is_drawn_away else NodeNameError)(
            f"{self._owner} has no fused attention for all of {', '.join(map(repr, missing))}; "
            "get_graph_node_names(model, attention_probabilities=True) lists the probabilities that there are"
        )

    def _with_operations(self, request: Request) -> Request:
        """Return a request with names in the place of the patterns that match operations; so for edits.

        Raises:
            NodeNameError: a pattern matches none; a DrawnAwayError where forward decides by random numbers what runs.
        """
        if not request.pending and (self._tracing.edits is None or not self._tracing.edits.pending):
            return request
        graph = self._tracing.graph()
        names = names_of(graph)
        try:
            request = request.among(list(with_probabilities(names, self._modules)), "return_nodes")
            if self._tracing.edits is not None:
                self._tracing.edits.among(names)
        except NodeNameError as error:
            if branches_on_random(graph):
                raise DrawnAwayError(str(error)) from error
            raise
        return request

    def _requested(self, request: Request, probabilities: Probabilities) -> TracedModel:
        asked = request
        for others in (self._tracing.edits, self._tracing.starts):
            asked = asked if others is None else others.with_names(asked)
        asked = probabilities.as_fused(asked) if probabilities.names else asked
        self._free_dims, self._left = None, set()
        graph = self._tracing.follow_or_trace_symbolically(partial(self._follow, asked), asked)
        nodes = select(graph, asked, self._owner, self._sites)
        for name, key in asked.items():
            if name in self._modules and key in nodes and nodes[key].op == "placeholder":
                raise NodeNameError(
                    f"'{name}' of {self._owner} is a module that does not run, and the name of an input", name
                )
        sites = self._call_sites(asked, nodes)
        if probabilities.names:
            nodes = probabilities.make(graph, nodes, request)
        left = self._read_somewhere(self._left)
        return TracedModel(graph, request, nodes, self._free_dims, left, sites)

    def _call_sites(self, asked: Request, nodes: Mapping[str, Node]) -> dict[str, CallSite]:
        """Return where in the code of the model the operations are that were asked for, by name."""
        found: dict[str, CallSite] = {}
        for name, key in asked.items():
            meta = nodes[key].meta if key in nodes and name not in self._modules else {}
            if (meta.get("qualified_name") == name or name in self._sites) and "call_site" in meta:
                site: CallSite = meta["call_site"]
                found[name] = site if self._is_whole else site._replace(total=None)
        return found

    @property
    def _sites(self) -> Mapping[str, CallSite]:
        """Which calls the names meant in the first graph of an extractor, in this mode."""
        training = self._tracing.training
        return self._tracing.options.call_sites.get(self._model.training if training is None else training, {})

    def _follow(self, asked: Request, example: Example) -> Graph:
        """Return the graph of a trace that opens what `asked` needs, or of one that opens all modules."""
        if self._names_operation_of_leaf(asked):
            try:
                return self._trace_all_opened(example, asked)
            except Exception:  # the list has none of them: the leaf is looked into for them alone
                pass
        error: Exception | None = None
        try:
            trace = self._trace_opened(example, asked)
            if names_match_full_trace(trace.graph, asked, trace.module_calls.whole.ran_inside):
                return trace.graph
        except (NodeNameError, TraceError) as caught:
            # A name may lie in a module that runs inside one it is no part of, or that cannot be followed while its
            # parts run by themselves; and a list of all names is of help.
            error = caught
        try:
            return self._trace_all_opened(example, asked)
        except NodeNameError as unknown:
            if isinstance(error, TraceError) and self._may_exist(str(unknown.name)):
                raise error from None
            raise

    def _trace_all_opened(self, example: Example, asked: Request) -> Graph:
        """Return the graph of a trace that opens all modules but leaves, as that of the list of names does."""
        tracer = self._opening_all(asked)
        try:
            trace, free = trace_checked(tracer, self._model, example.args, example.kwargs, self._finder(asked))
        except TraceError:
            self._check_names(asked)
            raise
        try:
            select(trace.graph, asked, self._owner, self._sites)
        except NodeNameError as unknown:
            if unknown.name in trace.module_calls.whole.ran_inside and not unknown.kept_whole:
                raise TraceError(
                    f"'{unknown.name}' of {self._owner} runs inside a call that is one node, such as that of an "
                    "autograd.Function or of compiled code, which no trace looks into. Request what is around it"
                ) from None
            raise
        self._note(trace, free)
        return trace.graph

    def _names_operation_of_leaf(self, request: Request) -> bool:
        """Say whether a name may be that of an operation in a module that is one node.

        One call of such a module may be looked into all the same, as where `functional_call` gives it other parameters.
        """
        others = [name for name in request if name not in self._modules]
        owners = {name.rpartition(".")[0] for name in others} & self._modules.keys()
        is_leaf = self._tracing.new_tracer(request).is_leaf if owners else None
        return is_leaf is not None and any(owner and is_leaf(self._modules[owner], owner) for owner in owners)

    def _check_names(self, request: Request) -> None:
        """Raise a NodeNameError for a name that is not there as far as forward can be followed, if one is like it."""
        asked = [name for name in request if name != OUTPUT and not self._may_exist(name)]
        if not asked:
            return
        try:
            names = self._all_names()
        except Exception:  # the model's own too; the error that is being handled says enough
            return
        end = self._tracing.ends.get(self._tracing.training)
        unknown = next((name for name in asked if name not in names), None)
        hint = "" if unknown is None else did_you_mean(unknown, dict.fromkeys([*names, *self._modules]))
        if end is not None and unknown is not None and hint and not self._is_in_other_mode(unknown):
            raise NodeNameError(
                f"No node '{unknown}' in {self._owner} as far as its forward can be followed: {end.reason}.{hint}",
                unknown,
            )

    def _is_in_other_mode(self, name: str) -> bool:
        """Say whether the other mode has a node of this name: this one may have it where it cannot be followed."""
        if self._tracing.training is None:
            return False
        try:
            with self._tracing.in_mode(not self._tracing.training):
                return name in self._all_names()
        except Exception:  # the model's own too
            return False

    def _trace_opened(self, example: Example, request: Request) -> ExampleTrace:
        opened = modules_to_open(self._modules, request) | self._tracing.options.opened
        trace, free = self._tracing.checked(self._tracing.new_tracer(request, opened), example, self._finder(request))
        self._note(trace, free)
        select(trace.graph, request, self._owner, self._sites)
        return trace

    def _opening_all(self, request: Request) -> ExampleTracer:
        """Return a tracer that opens all modules but leaves, and leaves in which a module is requested."""
        tracer = self._tracing.new_tracer(request)
        needed, is_leaf = modules_to_open(self._modules, self._modules.keys() & request), tracer.is_leaf
        tracer.is_leaf = lambda module, path: path not in needed and is_leaf(module, path)
        return tracer

    def _finder(self, request: Request) -> Finder:
        return Finder(request, self._owner, self._tracing.model_in_mode, self._sites)

    def _note(self, trace: ExampleTrace, free: FreeDims) -> None:
        self._tracing.note(trace)
        self._free_dims = free
        self._left.update(trace.checks.left)
        self._is_whole = trace.early_stop_reason is None

    def _may_exist(self, name: str) -> bool:
        """Say whether a node that is not in a trace may have this name: a module, or an operation inside of one.

        Operations of the model itself are in each trace, and a `ModuleList` has none.
        """
        around = name.rpartition(".")[0]
        has_forward = around in self._modules and type(self._modules[around]).forward is not nn.Module.forward
        return name in self._modules or (around != "" and has_forward)

    def _read_somewhere(self, left: Iterable[Left]) -> frozenset[Left]:
        """Return what code of the model reads or tests for, in any mode, and all globals."""
        kinds = {type(module) for module in self._modules.values() if not is_torch_layer(type(module))}
        return frozenset(
            each
            for each in left
            if not each.name or any(is_read(kind, each.name) or is_tested_for(kind, each.name) for kind in kinds)
        )
