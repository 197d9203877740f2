"""Cases: further graphs of an extractor, for inputs for which the first one does not hold."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from featx.codegen.bound import with_code_of_its_own
from featx.errors import FeatxError, NodeNameError, SlowTraceWarning, SpecializationError
from featx.examples import Example, holds_inputs, inputs_in
from featx.features.building.case_state import Case, check_case, left_by
from featx.features.building.own_train import looked_into
from featx.features.building.raising_graph import is_raising
from featx.features.building.rollback import RollbackRunner
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import attribute_at, module_at
from featx.shared_attributes import share
from featx.tracing.environment.compiler import is_in_jit_trace, not_compiled, not_compiled_itself
from featx.tracing.side_effects.left import Left

if TYPE_CHECKING:
    from featx.features.building.build import CaseTracer
    from featx.features.dual import DualGraphModule

_LOGGER = logging.getLogger("featx")
# If more graphs than this are needed, the inputs differ in a property that should be free.
_MOST = 16
# After so many seconds a user wonders what takes so long.
_LONG = 2.0
_Traced = TypeVar("_Traced")
# Train mode, eval mode, or None: as the modules of the model are, some in one and some in the other.
_ModeOrMixed = bool | None


class Cases:
    """Graphs of an extractor for inputs for which its first graph does not hold, each made when such an input comes.

    A text model decides in Python whether a mask is given, and whether a batch has padding.

    Args:
        model: what is traced again. It is kept, with its parts that no feature needs.
        tracer: makes the graphs.
        first: the inputs of the first graphs, if they are known.
    """

    def __init__(self, model: nn.Module, tracer: CaseTracer, first: Example | None) -> None:
        self.model = model
        self._tracer = tracer
        self._first = None if first is None else first.without_large_values()
        # How often the first graphs had been edited when the extractor was made.
        self._edits: dict[Graph, int] = {}
        self._attempts = RollbackRunner()
        # The further graphs by mode, with what runs them, and which of all graphs held last: 0 is the first one.
        self._further: dict[_ModeOrMixed, list[tuple[Case, Callable[..., Any]]]] = {True: [], False: [], None: []}
        self._held_last: dict[_ModeOrMixed, int] = {True: 0, False: 0, None: 0}
        # The first graph for a model with parts in both modes, and the mode that each of its modules had then.
        self._mixed: Graph | None = None
        self._flags: dict[str, bool] = {}
        # Whether the extractor has loaded a state dict, which says nothing of parts that it does not have.
        self.has_loaded = False

    def start(self, train_graph: Graph, eval_graph: Graph, present: Graph) -> None:
        """Note that the first graphs are as they were traced.

        `present` is what runs until the mode is set: another one than these two, if parts of the model are in train
        mode and parts are in eval mode.
        """
        firsts = dict.fromkeys((train_graph, eval_graph, present))
        self._edits = {graph: graph.edits for graph in firsts}
        self._mixed = None if present in (train_graph, eval_graph) else present
        if self._mixed is not None and not self._flags:  # a copy has them from the original
            self._flags = _flags_of(self.model)

    def is_for(self, graph: Graph) -> bool:
        """Say whether a graph is a first one that was not edited. An edit of it is an edit of no other."""
        return self._edits.get(graph) == graph.edits

    @not_compiled_itself
    def run(self, module: DualGraphModule, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        """Run the graph of `module` that holds for these inputs; make one if none does.

        Args:
            module: the extractor.
            function: what runs its first graph.
            args: the inputs.
            kwargs: those by name.

        Raises:
            SpecializationError: no graph holds, and none can be made from the parts that the extractor has.
            TraceError: the model cannot be traced on these inputs.
        """
        args, kwargs = inputs_by_name(self.model, args, kwargs)
        if not self.is_for(module.graph):
            return function(module, *args, **kwargs)
        mode = self._mode_of(module)
        cases = [(self._first_case(module), function), *self._further[mode]]
        last = self._held_last[mode]
        refused: dict[int, SpecializationError] = {}
        for index in sorted(range(len(cases)), key=lambda each: each != last):
            (graph, example), run = cases[index]
            if index and not has_names_of(graph, example, kwargs):
                continue
            inputs = with_defaults(module.graph, len(args), kwargs) if index else kwargs
            try:
                result = self._attempts.run(functools.partial(run, module), graph, module, args, inputs)
            except SpecializationError as error:
                refused[index] = error
            else:
                self._held_last[mode] = index
                return result
        if is_in_jit_trace():  # a trace of the model would become a part of that one
            raise refused[0]
        start = time.perf_counter()
        case = self._traced(module, args, kwargs, refused[0])
        seconds = time.perf_counter() - start
        result = case[1](module, *args, **with_defaults(module.graph, len(args), kwargs))
        self._further[mode].append(case)
        self._held_last[mode] = len(self._further[mode])
        if seconds > _LONG:
            _warn_of_slow_trace(type(self.model).__name__, seconds, refused[0])
        return result

    def graphs_for(self, module: DualGraphModule, args: Any, kwargs: Any) -> Iterator[Graph]:
        """Yield the graphs of `module` in its mode, and one for these inputs, which is made when it is asked for."""
        yield module.graph
        if self.is_for(module.graph):
            yield from (case.graph for case, _ in self._further[self._mode_of(module)])
            refused = SpecializationError("No graph of this extractor holds for these inputs.")
            yield self._traced(module, args, kwargs, refused)[0].graph

    def further_graphs(self) -> list[Graph]:
        """Return the graphs that were made for other inputs, in all modes."""
        return [case.graph for further in self._further.values() for case, _ in further]

    @not_compiled  # where torch.compile goes on after a graph that has raised
    def _traced(
        self, module: DualGraphModule, args: Any, kwargs: Any, refused: SpecializationError
    ) -> tuple[Case, Callable[..., Any]]:
        name = type(self.model).__name__
        mode = self._mode_of(module)
        if len(self._further[mode]) >= _MOST:
            raise SpecializationError(
                f"{refused} This extractor has made {_MOST} more graphs for other inputs, and makes no more. One with "
                "adaptive=True goes on; inputs that are padded or resized to few sizes need fewer graphs"
            ) from None
        if mode is None and _flags_of(self.model) != self._flags:
            raise SpecializationError(
                f"{refused} The model has parts in train mode and others in eval mode, and these are no longer those "
                "of the time when this extractor was made. Make it again, or call its train() or eval()"
            ) from None
        _LOGGER.info("%s: tracing again for an input of another kind: %s", name, refused)
        example = Example(args, kwargs, "this input")
        opened = self._opened()
        known = [self._first_case(module), *(each for each, _ in self._further[mode])]
        graph = trace_for_input(
            lambda: self._tracer.graph(self.model, mode, example, opened), [each.graph for each in known]
        )
        missing = sorted({str(node.target) for node in graph.nodes if self._is_missing(module, node)})
        kept_back = [path for path in missing if self._may_differ_in_model(module, path)]
        if kept_back:
            raise SpecializationError(
                f"{refused} For this input the model uses parts that this extractor does not have: "
                f"{', '.join(kept_back[:5])}. Those of the model may not go with the present weights of the extractor. "
                "With adaptive=True it has all of them."
            )
        case = Case(graph, example.without_large_values())
        self._check(case, known, module)
        for path in missing:
            _take(module, self.model, path, mode)
        run = module.compiled(graph)
        replaced = self._replaced_tensor(module, graph)
        if replaced is not None:
            raise SpecializationError(
                f"{refused} The model has replaced '{replaced}' since this extractor was made, which has the tensor of "
                "then. Make the extractor again, or with adaptive=True."
            )
        return case, run

    def _mode_of(self, module: DualGraphModule) -> _ModeOrMixed:
        return None if module.graph is self._mixed else module.training

    def _check(self, case: Case, known: list[Case], module: DualGraphModule) -> None:
        """Raise where a new case does not go together with `known`, or with those of another mode."""
        mode = self._mode_of(module)
        others = [case for other, further in self._further.items() if other is not mode for case, _ in further]
        if self._mixed is None:
            others += first_in_other_mode(module, self._first)
            is_unaffected = functools.partial(self._tracer.is_unaffected, self.model, module.training)
        else:
            firsts = [graph for graph in self._edits if graph is not module.graph and not is_raising(graph)]
            others += [Case(graph, self._first) for graph in firsts]
            is_unaffected = _always_affected
        check_case(case, known, others, self.model, is_unaffected)

    def _first_case(self, module: DualGraphModule) -> Case:
        return Case(module.graph, self._first)

    def _opened(self) -> frozenset[str]:
        """Return the paths of the modules that the first graphs look into: the extractor has parts of them alone."""
        return looked_into(self._edits)

    def _is_missing(self, module: DualGraphModule, node: Node) -> bool:
        """Say whether the extractor does not have what a node calls or reads, or has parts of it alone."""
        if node.op == "get_attr":
            return attribute_at(module, str(node.target)) is None
        if node.op != "call_module":
            return False
        own, of_model = (attribute_at(root, str(node.target)) for root in (module, self.model))
        # A module of a Feature is none of the model's.
        return own is None or (of_model is not None and type(own) is not type(of_model))

    def _may_differ_in_model(self, module: DualGraphModule, path: str) -> bool:
        """Say whether a missing part may be another one in the model than the extractor should have.

        The extractor has parts of it that somebody may have exchanged, or has loaded a state dict without it.
        """
        return attribute_at(module, path) is not None or (self.has_loaded and _is_saved(self.model, path))

    def _replaced_tensor(self, module: DualGraphModule, graph: Graph) -> str | None:
        """Return the path of a tensor that a graph reads, and of which the extractor has another one than the model."""
        for path in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr")):
            own, now = (attribute_at(root, path) for root in (module, self.model))
            if own is now or not isinstance(own, torch.Tensor) or not isinstance(now, torch.Tensor):
                continue
            if own.shape != now.shape or not torch.equal(own, now.to(own)):
                return path
        return None

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are made again: what runs them is no plain state.
        state = vars(Cases(self.model, self._tracer, self._first))
        return {**state, "_flags": self._flags, "has_loaded": self.has_loaded}


def _flags_of(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


def _always_affected(example: Example, earlier: Example, *, is_in_mode: bool, is_same_mode: bool) -> bool:
    """Let a call count as one that changes later ones: the runs that would tell know of one mode for all modules."""
    return False


def first_in_other_mode(module: DualGraphModule, example: Example | None) -> list[Case]:
    """Return the first case of an extractor in the other one of train and eval mode, if it can be traced there."""
    graph = module.eval_graph if module.training else module.train_graph
    return [] if is_raising(graph) else [Case(graph, example)]


def with_defaults(first: Graph, count: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs by name with those that are left out after the first `count`, as the first graph has them.

    In another graph their defaults are what the call has given for which it was traced.
    """
    inputs = first.find_nodes(op="placeholder")
    left_out = {node.target: node.args[0] for node in inputs[count:] if node.args and node.target not in kwargs}
    # Where it is `...`, forward has a list or another object that no graph holds: it stays left out.
    return {**{name: value for name, value in left_out.items() if value is not ...}, **kwargs}


def has_names_of(graph: Graph, example: Example | None, kwargs: dict[str, Any]) -> bool:
    """Say whether a call gives what forward takes by `**kwargs` under the names of the example of a graph.

    What is left out there has no default: the graph would take what its example had.
    """
    named = {node.target for node in graph.find_nodes(op="placeholder")}
    of_example = set() if example is None else example.kwargs.keys() - named
    return of_example == kwargs.keys() - named


def _warn_of_slow_trace(name: str, seconds: float, refused: SpecializationError) -> None:
    reason = str(refused).partition(". ")[0]  # without what to do about it
    warnings.warn(
        f"{name} was traced again for an input of another kind, which took {seconds:.1f} s: {reason}. Further inputs "
        "of this kind run at once. To trace for them when the extractor is made, give such an input as example_inputs",
        SlowTraceWarning,
        stacklevel=3,
    )


def _take(extractor: DualGraphModule, model: nn.Module, path: str, mode: _ModeOrMixed) -> None:
    """Give an extractor a part of the model, in this mode."""
    share(model, extractor, path)
    part = module_at(extractor, path)
    if part is not None and mode is not None:
        part.train(mode)
        extractor.keep_exceptions()


def _is_saved(root: nn.Module, path: str) -> bool:
    """Say whether what is at a path is in the state dict of a module, or has something there."""
    found = attribute_at(root, path)
    if isinstance(found, nn.Module):
        return bool(found.state_dict()) or any(True for _ in found.buffers())
    return path in root.state_dict(keep_vars=True)


def trace_for_input(trace: Callable[[], _Traced], known: Iterable[Graph]) -> _Traced:
    """Trace a model, of which graphs with the requested values are known, for another input.

    Raises:
        SpecializationError: for this input the model does not compute a requested value, or it fails and may need what
            an earlier call, of one of the `known` graphs, would have left in an attribute.
    """
    try:
        return trace()
    except NodeNameError as error:
        asked = repr(error.name) if error.name else "a requested value"
        raise SpecializationError(
            f"{asked} was computed for an earlier input, and the model does not compute it for this one: the module "
            "does not run, or the operation is not reached. Request what is computed for each input, or use an "
            "extractor of its own for such inputs"
        ) from error
    except FeatxError:
        raise
    except Exception as error:
        left = frozenset[Left]().union(*map(left_by, known))
        if not left:
            raise  # as the model itself does
        raise SpecializationError(
            f"for this input forward raises {error!r}. For others it stores what it computes in {min(left)}. "
            "If it needs that here, use an extractor of its own, made from the model after such a call: an extractor "
            "stores nothing on the model"
        ) from error


def inputs_by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a call; a dict in their place, such as what a tokenizer returns, has them by name."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and holds_inputs(model, args[0]):
        return inputs_in(cast("Mapping[str, Any]", args[0]))
    return args, kwargs


def with_cases(forward: MethodType, cases: Cases) -> MethodType:
    """Return a forward function that looks for another graph where the first one, which `forward` runs, does not hold.

    A compiler sees the first graph alone.
    """
    function = forward.__func__

    @functools.wraps(function)
    def run(self: DualGraphModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        return cases.run(self, function, args, kwargs)

    return MethodType(with_code_of_its_own(run), forward.__self__)
