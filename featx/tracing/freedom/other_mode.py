"""What a trace in train or eval mode found out, for one of the same model in the other mode."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from featx.ir.dropout import nodes_of_dropout
from featx.ir.equality import first_nodes
from featx.ir.graph import Graph
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.freedom.free_dtypes import OtherDtypes, dtype_checks
from featx.tracing.freedom.gradient_mode import gradient_checks
from featx.tracing.replica.mode_reads import ModeReads, set_mode
from featx.tracing.signals import GAVE_UP, ThreadInterference
from featx.tracing.sizes.outcomes import IF_TAKEN, FreeDims, Outcome
from featx.tracing.sizes.resizing import Dim
from featx.tracing.sizes.same_needed import count_needed, places_of_requested


@dataclass
class OtherMode:
    """What a trace in train or eval mode found out, for one of the same model on the same inputs in the other mode.

    Attributes:
        dims: what is known of each dimension of the inputs.
        depends_on_autocast: whether forward sets or asks for the state of autocast, where that has to be observed.
        depends_on_gradients: whether it does something else without gradients, and was not seen to ask for them.
        reads: observes whether anything asks for a mode, while the first of the two is traced.
        graph: what the model did in that mode, where nothing but dropout asked; it does the same in the other one.
        cached: the names of its nodes whose values a second call has used.
        dtypes: what was found of other dtypes.
        shown_otherwise: which of its numbers C code has seen as others; see `Numbers`.
        needed: how many of its nodes matter for what is requested; None is all.
        places: at which places in it the requested nodes are.
        on_earlier_inputs: what a trace in the present mode found of the dimensions of other inputs. Those that were
            refused there are not tried one by one.
        before: the last trace in that mode, if its replica may be called again. `drop` ends that.
        keeps_first: whether `first` is kept.
        first: the graph of the first of the two before checks of what is fixed were added.
    """

    dims: dict[Dim, Outcome] = field(default_factory=lambda: dict[Dim, Outcome]())
    reads: ModeReads | None = None
    depends_on_autocast: bool = False
    depends_on_gradients: bool = False
    graph: Graph | None = None
    cached: frozenset[str] = frozenset()
    dtypes: OtherDtypes | None = None
    shown_otherwise: frozenset[int] = frozenset()
    needed: int | None = None
    places: list[int] | None = None
    on_earlier_inputs: FreeDims | None = None
    before: ExampleTrace | None = None
    keeps_first: bool = False
    first: Graph | None = None

    def trace(self, request: TraceRequest) -> ExampleTrace | None:
        """Trace the next call of the replica, in this mode. None where that is not possible, or does something else."""
        before, self.before = self.before, None
        tracer = request.tracer
        if before is None or self.graph is None or tracer.training is None:
            return None
        for module in before.replica.paths:
            set_mode(module, tracer.training)
        conditions = Conditions("the other mode", before.is_real, before.gradients, before=before)
        try:
            trace = request.run(before, conditions)
        except (ThreadInterference, *GAVE_UP):
            before.drop_replica()
            return None
        trace.needed = count_needed_by_further_runs(trace)
        if self.does_the_same(trace):
            return trace
        trace.drop_replica()
        return None

    def drop(self) -> None:
        """Drop the replica, if there is one."""
        before, self.before = self.before, None
        if before is not None:
            before.drop_replica()

    def does_the_same(self, trace: ExampleTrace) -> bool:
        """Say whether what was found out holds for a trace in the other mode too."""
        if self.graph is None or trace.needed != self.needed:
            return False
        if nodes_of_dropout(trace.graph, self.graph, self.needed) is None:
            return False
        return self.needed is None or places_of_requested(trace) == self.places

    def dtypes_for(self, trace: ExampleTrace) -> OtherDtypes | None:
        """Return what was found of other dtypes, if it holds for a trace that `does_the_same`; else None."""
        known = self.dtypes
        if known is None or self.graph is None:
            return None
        nodes = first_nodes(trace.graph, self.needed)
        differing = nodes_of_dropout(trace.graph, self.graph, self.needed)
        return known if differing is not None and differing.isdisjoint(nodes[place] for place in known.places) else None

    def refuses_samples(self) -> bool:
        """Say whether the model has refused some number of samples. A layer may do so in one mode alone."""
        return any(dim == 0 and (each.is_refusal or each == IF_TAKEN) for (_, dim), each in self.dims.items())

    def forget(self) -> None:
        """Forget what the model does, since something has asked for a mode."""
        self.graph = None
        self.drop()

    def note(self, trace: ExampleTrace, dims: dict[Dim, Outcome]) -> None:
        """Keep what was found out, and the graph where nothing but dropout has asked for a mode so far."""
        self.dims.update(dims)
        self.graph = copy.deepcopy(trace.graph) if self.reads is not None and not self.reads.decides else None
        self.shown_otherwise = trace.numbers.shown_otherwise
        self.needed, self.places, self.cached = trace.needed, places_of_requested(trace), trace.cached


def count_needed_by_further_runs(trace: ExampleTrace) -> int | None:
    """Return how many nodes of a trace matter for what is requested, if there will be further runs; None is all."""
    has_further_runs = (
        trace.numbers.sizes_were_read or trace.is_real or gradient_checks(trace.graph) or dtype_checks(trace.graph)
    )
    return count_needed(trace) if has_further_runs else None
