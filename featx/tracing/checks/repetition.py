"""Compare a second call on the same replica with the first one, to find state that Python keeps between calls.

Python code can keep state between calls in many places (iterators, closures, objects of libraries). A graph repeats
what the first call found there. So the calls are compared.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from featx.errors import TraceError
from featx.ir.equality import first_difference, is_same_graph
from featx.ir.graph import Graph
from featx.tracing.checks.filled_caches import differ_by_caches_alone
from featx.tracing.checks.opened_later import differ_inside_whole_modules
from featx.tracing.example.conditions import Conditions, WantedIn
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ATTEMPTS, ExampleTracer
from featx.tracing.guards.scalars import Diverged
from featx.tracing.signals import DiffersInside, Disturbed, GoesByAutocast, NeedsValues


def check_repeats(
    tracer: ExampleTracer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trace: ExampleTrace,
    wanted_in: WantedIn | None = None,
) -> bool:
    """Raise where a second call with the same inputs does something else than the one in `trace`.

    A second call is compared with the record of the first one, with another state of autocast around it. Where it
    differs, two traces on one replica tell whether the first call has only filled a cache. They hear whether forward
    goes by autocast, if that is not known.

    Returns:
        Whether the second call was like the first one in all, so that the replica of `trace` may be called again; else
        it is used up.

    Raises:
        GoesByAutocast: forward does, and that was not heard in `trace`.
        DiffersInside: a submodule that is looked into keeps something from call to call that its next call finds.
        TraceError: the model itself does.
    """
    if trace.may_go_by_autocast and not tracer.hears_autocast:
        raise GoesByAutocast
    repeats = _repeats(tracer, args, kwargs, trace)
    if repeats:
        return True
    first = trace
    with _hearing_autocast(tracer) as is_news:
        for attempt in range(ATTEMPTS):
            if repeats is not None or attempt:  # the replica is used up
                first.drop_replica()
                conditions = Conditions("a first call, to be compared", trace.is_real, trace.gradients)
                first = tracer.run_once(trace.surroundings, args, kwargs, wanted_in, conditions)
                first.forget_record()
            try:
                if is_news and first.goes_by_autocast:
                    raise GoesByAutocast
                _check_traces(tracer, args, kwargs, first, wanted_in, is_news=is_news)
                break
            except Disturbed as error:
                if attempt + 1 == ATTEMPTS:
                    raise TraceError(f"cannot trace {_name(trace)} while other threads run: {error}") from error
            finally:
                first.drop_replica()
    return False


@contextmanager
def _hearing_autocast(tracer: ExampleTracer) -> Generator[bool]:
    """Let the tracer hear whether forward goes by autocast; yield whether it did not do so before."""
    was, tracer.hears_autocast = tracer.hears_autocast, True
    try:
        yield not was
    finally:
        tracer.hears_autocast = was


def _repeats(tracer: ExampleTracer, args: Any, kwargs: Any, trace: ExampleTrace) -> bool | None:
    if not trace.can_repeat():
        trace.forget_record()
        return None
    with tracer.log.run(_name(trace), "a second call, against the record of the first", is_real=False):
        return trace.repeats(args, kwargs)


def _name(trace: ExampleTrace) -> str:
    return type(trace.surroundings.traced).__name__


def _check_traces(
    tracer: ExampleTracer, args: Any, kwargs: Any, trace: ExampleTrace, wanted_in: Any, *, is_news: bool
) -> None:
    name = _name(trace)
    second = _next(tracer, args, kwargs, trace, wanted_in)
    if isinstance(second, BaseException):
        raise TraceError(f"cannot trace {name}: its second call differs from the first one: {second}") from second
    try:
        if is_news and second.goes_by_autocast:
            raise GoesByAutocast
        if is_same_graph(second.graph, trace.graph):
            return
        if trace.checks.keeps_of_input is not None:
            raise TraceError(
                f"cannot trace {name}: {trace.checks.keeps_of_input}, and runs other operations in the next call"
            )
        wanted = tuple(wanted_in(each.graph, "") if wanted_in else () for each in (trace, second))
        is_cached = differ_by_caches_alone(trace.graph, second.graph, trace.origins(), (wanted[0], wanted[1]))
        if not is_cached and not _opens_more(tracer, args, kwargs, (trace, second), wanted_in):
            path = _module_that_differs(trace.graph, second.graph)
            if path and tracer.opened is None and path not in tracer.whole:
                raise DiffersInside(path)
            raise TraceError(
                f"cannot trace {name}: forward runs other operations in a second call with the same inputs. It keeps a "
                "counter, an iterator or similar state, which a graph would not advance. To go on, put the code that "
                "does it into a submodule, which is kept whole, or keep the value in a buffer."
            )
    finally:
        second.drop_replica()


def _module_that_differs(first: Graph, second: Graph) -> str:
    """Return the path of the innermost module in which the graphs begin to differ, or ""."""
    node = next((node for node in first_difference(first, second) or () if node.op != "output"), None)
    around = [] if node is None else [path for path in node.meta["nn_module_stack"] if path != node.target]
    return around[-1] if around else ""


def _opens_more(
    tracer: ExampleTracer, args: Any, kwargs: Any, traces: tuple[ExampleTrace, ExampleTrace], wanted_in: Any
) -> bool:
    """Say whether the second trace may differ because a module that the first one kept whole could be followed there.

    A module that registers a buffer in its first call is one. What is inside it cannot be compared then; a third trace
    must be like the second one.
    """
    first, second = traces
    if not differ_inside_whole_modules(first.graph, second.graph):
        return False
    third = _next(tracer, args, kwargs, second, wanted_in)
    if isinstance(third, BaseException):
        return False
    third.drop_replica()
    return is_same_graph(third.graph, second.graph)


def _next(
    tracer: ExampleTracer, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: ExampleTrace, wanted_in: Any
) -> ExampleTrace | BaseException:
    conditions = Conditions("a second call, to be compared", before.is_real, before.gradients, before=before)
    try:
        return tracer.run_once(before.surroundings, args, kwargs, wanted_in, conditions)
    except (Diverged, NeedsValues, Exception) as error:
        return error
