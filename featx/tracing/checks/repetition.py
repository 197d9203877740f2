"""Compare a second call on the same replica with the first one, to find state that Python keeps between calls.

Python code can keep state between calls in many places (iterators, closures, objects of libraries). A graph repeats
what the first call found there. So the calls are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from featx.errors import TraceError
from featx.ir.equality import first_difference, is_same_graph
from featx.ir.graph import Graph
from featx.ir.names import shown_name
from featx.ir.node import Node
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.example.tracer import ATTEMPTS, ExampleTracer
from featx.tracing.freedom.filled_caches import (
    differ_only_by_caches,
    first_new_value,
    keeps_drawn_numbers,
    used_of_first,
)
from featx.tracing.freedom.gradient_mode import gradient_checks
from featx.tracing.model_state.unread import unread
from featx.tracing.recording.recorder import MAY_COMPARE
from featx.tracing.signals import (
    GAVE_UP,
    KEEP_WHOLE_ADVICE,
    DependsOnAutocast,
    DependsOnGradients,
    NeedsSharedInputs,
    ReadInNextCall,
    ReadsStored,
    SubmoduleNotRepeatable,
    ThreadInterference,
)
from featx.tracing.sizes.same_needed import matches_needed_nodes

_WAY_OUT = (
    "A graph would not repeat that. To go on, put the code that does it into a submodule, which is kept whole, or keep "
    "the value in a buffer."
)
_CHANGES = "changes an object of Python in each call (an iterator, a variable of a closure, an array or the like),"


def check_repeats(request: TraceRequest, trace: ExampleTrace) -> bool:
    """Raise where a second call with the same inputs does something else than the one in `trace`.

    A second call is compared with the record of the first one, with another state of autocast around it and without
    gradients. Where it differs, two traces on one replica tell whether the first call has only filled a cache. They
    record whether forward depends on autocast, if that is not known, and one more tells whether it does on gradients.

    Returns:
        Whether the second call was like the first one in all, so that the replica of `trace` may be called again; else
        it is used up.

    Raises:
        DependsOnAutocast: forward does, and that was not observed in `trace`.
        DependsOnGradients: forward does, and the graph of `trace` has no check of that.
        ReadsStored: code reads a count that its source did not show it to read.
        ReadInNextCall: the second call reads attributes that were taken away.
        SubmoduleNotRepeatable: an opened submodule keeps something from call to call that its next call reads.
        TraceError: the model itself does.
    """
    tracer = request.tracer
    if trace.recorder.autocast_modes.has_ambiguous_dtype and not tracer.observes_autocast:
        raise DependsOnAutocast
    repeats = _repeats(request, trace)
    trace.has_filled_caches = trace.checks.cache_message is not None
    if repeats:
        return True
    if trace.recorder.compared_alias is not None:
        _refuse_comparison(tracer, trace)
    if not (trace.is_real and _repeats_without_values(request, trace)):
        _check_whole_calls(request, trace, is_used_up=repeats is not None)
    _check_gradients(request, trace)
    return False


def _check_whole_calls(request: TraceRequest, trace: ExampleTrace, *, is_used_up: bool) -> None:
    """Compare the traces of two calls, of which the first one is `trace` unless its replica is used up."""
    tracer, first = request.tracer, trace
    with _observing_autocast(tracer) as newly_observed:
        for attempt in range(ATTEMPTS):
            if is_used_up or attempt:
                first.drop_replica()
                conditions = Conditions("a first call, to be compared", trace.is_real, trace.gradients)
                first = request.run(trace, conditions)
                first.forget_record()
            try:
                if newly_observed and first.recorder.autocast_modes.was_observed:
                    raise DependsOnAutocast
                _check_traces(request, first, checked=trace, newly_observed=newly_observed)
                break
            except ThreadInterference as error:
                if attempt + 1 == ATTEMPTS:
                    raise TraceError(f"cannot trace {trace.name} while other threads run: {error}") from error
            finally:
                first.drop_replica()


def _check_gradients(request: TraceRequest, trace: ExampleTrace) -> None:
    """Raise DependsOnGradients where a run without them does something else. That they are on is no answer of a graph.

    Where forward was seen to ask, the graph has a check of that answer, which may be one of several.
    """
    if not trace.gradients or request.tracer.checks_gradient_mode:
        return
    checks = frozenset(gradient_checks(trace.graph))
    for is_real in (False, True) if trace.is_real else (False,):
        conditions = Conditions("gradients off, to be compared", is_real, gradients=False, earlier=trace)
        again = request.attempt(trace, conditions)
        if again is not None and matches_needed_nodes(again, trace, checks):
            return
    raise DependsOnGradients


def _keep_whole_if_possible(tracer: ExampleTracer, path: str, why: str) -> None:
    """Raise `SubmoduleNotRepeatable` if the module at `path` is a submodule that was looked into and need not be."""
    if path and tracer.opened is None and path not in tracer.opaque_reasons:
        raise SubmoduleNotRepeatable(path, why)


def _refuse_comparison(tracer: ExampleTracer, trace: ExampleTrace) -> NoReturn:
    """Raise because code may use `is` to test whether a call returned its input."""
    path, place = trace.recorder.compared_alias or ("", "")
    _keep_whole_if_possible(tracer, path, MAY_COMPARE)
    raise TraceError(f"cannot trace {trace.name}: {MAY_COMPARE} {place}".rstrip() + f". To go on, {KEEP_WHOLE_ADVICE}.")


@contextmanager
def _observing_autocast(tracer: ExampleTracer) -> Generator[bool]:
    """Let the tracer observe whether forward depends on autocast; yield whether it did not do so before."""
    was, tracer.observes_autocast = tracer.observes_autocast, True
    try:
        yield not was
    finally:
        tracer.observes_autocast = was


def _repeats(request: TraceRequest, trace: ExampleTrace) -> bool | None:
    if not trace.can_repeat():
        trace.forget_record()
        return None
    with request.tracer.log.run(trace.name, "a second call, against the record of the first", is_real=False):
        states = trace.python_states() if trace.has_changed_state() else None
        repeats = trace.repeats(request.args, request.kwargs)
    repeats = repeats and (states is None or trace.python_states() == states)
    if repeats:
        _check_only_stored(request, trace)
    trace.forget_record()
    return repeats


def _check_only_stored(request: TraceRequest, last: ExampleTrace) -> None:
    """Let a further call show that nothing reads the counts and lists that forward is taken to add to only.

    Args:
        request: the example, and the tracer.
        last: the last call on the replica, which is used up if a count is read.

    Raises:
        ReadsStored: a count is read.
    """
    stored = last.checks.only_stored()
    if not stored:
        return
    reason = "a further call, in which counts cannot be read"
    with unread(stored):
        if last.can_repeat():
            with request.tracer.log.run(last.name, reason, is_real=False):
                is_same = last.repeats(request.args, request.kwargs)
        else:
            is_same = _is_same_call(request, last, reason)
    if not is_same:
        raise ReadsStored


def _is_same_call(request: TraceRequest, last: ExampleTrace, reason: str) -> bool:
    """Say whether the next call on the replica of `last` records the same graph."""
    conditions = Conditions(reason, last.is_real, last.gradients, before=last)
    try:
        return is_same_graph(request.run(last, conditions).graph, last.graph)
    except GAVE_UP:
        return False


def _repeats_without_values(request: TraceRequest, trace: ExampleTrace) -> bool:
    """Say whether two calls without values do what a trace for real did, of which they are told the values it read.

    They take a small part of its time. The graph checks when it runs that it reads the same values, so what is left to
    compare is the state of Python. False if a call needs further values, or is not the same.
    """
    conditions = Conditions(
        "a first call without values, to be compared", False, trace.gradients, earlier=trace, is_complete=True
    )
    try:
        first = request.run(trace, conditions)
    except (ThreadInterference, *GAVE_UP):
        return False
    try:
        if not is_same_graph(first.graph, trace.graph) or first.checks.kept_input_message is not None:
            return False
        states = first.python_states()
        again = replace(conditions, reason="a second call without values, to be compared", before=first)
        second = request.run(trace, again)
        is_same = is_same_graph(second.graph, trace.graph) and second.python_states() == states
        if is_same:
            _check_only_stored(request, second)
        second.drop_replica()
        return is_same
    except (ThreadInterference, *GAVE_UP):
        return False
    finally:
        first.drop_replica()


def _second_call(request: TraceRequest, first: ExampleTrace) -> ExampleTrace:
    """Trace the next call on the replica of `first`.

    Raises:
        ReadInNextCall: it reads attributes that were taken away.
        TraceError: it fails otherwise, or does something else.
    """
    conditions = Conditions(
        "a second call, to be compared", first.is_real, first.gradients, before=first,
        is_recorded=True,
    )  # fmt: skip
    try:
        return request.run(first, conditions)
    except GAVE_UP as error:
        missing = getattr(error, "name", None) if isinstance(error, AttributeError) else None
        read = {attribute for attribute in first.checks.absent if attribute[1] == missing}
        if read:
            raise ReadInNextCall(read) from error
        raise TraceError(f"cannot trace {first.name}: its second call differs from the first one: {error}") from error


def _check_traces(request: TraceRequest, trace: ExampleTrace, *, checked: ExampleTrace, newly_observed: bool) -> None:
    name = trace.name
    states = trace.python_states()
    second = _second_call(request, trace)
    try:
        if newly_observed and second.recorder.autocast_modes.was_observed:
            raise DependsOnAutocast
        if is_same_graph(second.graph, trace.graph):
            _check_fixed_point(request.tracer, second, states)
            _check_only_stored(request, second)
            _check_identity(request, checked, second)
            return
        if trace.checks.kept_input_message is not None:
            raise TraceError(
                f"cannot trace {name}: {trace.checks.kept_input_message}, and runs other operations in the next call"
            )
        root = trace.replica.root
        if keeps_drawn_numbers(trace.graph, second.graph, trace.origins(), root, is_real=trace.is_real):
            raise TraceError(
                f"cannot trace {name}: forward draws random numbers in its first call and keeps them for later calls, "
                "and a graph would draw them anew. To go on, draw them in __init__, and keep them in a buffer."
            )
        requested = request.find_requested(trace.graph, "") if request.find_requested else ()
        is_cached = differ_only_by_caches(trace.graph, second.graph, trace.origins(), root, requested)
        if not is_cached:
            if requested and differ_only_by_caches(trace.graph, second.graph, trace.origins(), root):
                _refuse_values_of_first_call(name, second.graph, requested)
            path = _module_that_differs(trace, second)
            _keep_whole_if_possible(
                request.tracer, path, "it runs other operations in a second call with the same inputs"
            )
            what = trace.checks.cache_message or "forward keeps a counter, an iterator or similar state,"
            raise TraceError(
                f"cannot trace {name}: {what.rstrip(',')}, and runs other operations in a second call with the same "
                f"inputs. {_WAY_OUT}"
            )
        _check_fixed_point(request.tracer, second, states)
        _check_only_stored(request, second)
        checked.has_filled_caches = True
        checked.cached = frozenset(node.name for node in used_of_first(trace.graph, second.graph, trace.origins()))
    finally:
        second.drop_replica()


def _refuse_values_of_first_call(name: str, second: Graph, requested: Collection[Node]) -> None:
    """Raise where a second call has no values of the names that are requested."""
    later = {node.meta.get("qualified_name") for node in second.nodes}
    missing = sorted({shown_name(node) for node in requested} - later)
    if not missing:
        return
    shown = ", ".join(repr(each) for each in missing[:3]) + (", ..." if len(missing) > 3 else "")
    raise TraceError(
        f"cannot trace {name}: the model computes {shown} in its first call alone, and keeps the result for later "
        "calls. An extractor gives what each call computes. To go on, leave it out of the request."
    )


def _check_fixed_point(tracer: ExampleTracer, second: ExampleTrace, states: Mapping[str, Any]) -> None:
    """Raise if the second call has changed Python objects that the first one had left, so that a third may differ."""
    now = second.python_states()
    changed = [path for path, state in now.items() if state != states.get(path, state)]
    if not changed:
        return
    path = max(changed, key=lambda each: each.count(".") if each else -1)
    owner = f"forward of '{path}'" if path else "forward"
    what = second.checks.cache_message or f"{owner} {_CHANGES}"
    _keep_whole_if_possible(tracer, path, what.rstrip(","))
    raise TraceError(
        f"cannot trace {second.name}: {what.rstrip(',')}, and a later call may do something else. {_WAY_OUT}"
    )


def _check_identity(request: TraceRequest, trace: ExampleTrace, second: ExampleTrace) -> None:
    """Find out whether a further call depends on which tensors are one object: traces that agree have hidden that.

    Args:
        request: the example, and the tracer.
        trace: gets a check of its inputs, where that matters.
        second: the last call on the replica.

    Raises:
        TraceError: forward tests whether a call returned its input.
    """
    args, kwargs, record = request.args, request.kwargs, second.recorder.call_record
    if record is None or not second.can_repeat():
        return
    with request.tracer.log.run(trace.name, "further calls, where other tensors are one object", is_real=False):
        if not second.repeats(args, kwargs, returned=False, inputs=False):
            return
        if record.returned_inputs and not second.repeats(args, kwargs, inputs=False):
            _refuse_comparison(request.tracer, second)
        if not record.equal_inputs or second.repeats(args, kwargs, returned=False):
            return
    try:
        trace.require_aliases(args, kwargs)
    except NeedsSharedInputs:
        raise TraceError(
            f"cannot trace {trace.name}: forward tests whether two of its inputs are one tensor, and the example has "
            "one tensor as two inputs. To go on, give an example with different ones."
        ) from None


def _module_that_differs(first: ExampleTrace, second: ExampleTrace) -> str:
    """Return the path of the innermost module in which the graphs begin to differ, other than by caches, or ""."""
    node = first_new_value(first.graph, second.graph, first.origins(), first.replica.root)
    if node is None or node.op == "output":
        pair = first_difference(first.graph, second.graph) or ()
        node = next((node for node in pair if node.op != "output"), None)
    if node is None:
        return ""
    # A module that is one node in both calls differs by what it is given.
    is_one_node = node.op == "call_module" and first.graph.find_nodes(op="call_module", target=node.target)
    around = [path for path in node.meta.get("nn_module_stack", {}) if path != node.target or not is_one_node]
    return around[-1] if around else ""
