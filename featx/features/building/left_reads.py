"""Which attributes that calls in one mode leave on the model are read by a call in the other mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from featx.examples import Example
from featx.features.building.tracing import ModelTracing
from featx.tracing.checks.other_calls import assigned_by_two_calls
from featx.tracing.side_effects.left import Left
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.source.attributes import is_tested_for


def read_of(left: Iterable[Left], tracing: ModelTracing) -> Left | None:
    """Return one of these attributes that forward reads in the mode of `tracing` before it assigns it, if any.

    Forward runs without them. Where a class has one of them too, all count that two calls in the other mode assign.
    Where that says nothing, the first one is returned.
    """
    known = {each.attribute: replace(each, text=each.name or each.text) for each in left}
    example = tracing.example()
    if any(each.name and hasattr(type(tracing.modules[each.path]), each.name) for each in known.values()):
        assigned = None if example is None else _assigned_in_other_mode(example, tracing)
        if assigned is None:
            return min(known.values())
        known = {(path, name): Left(path, name, name) for path, name in assigned} | known
    for (path, name), each in sorted(known.items()):
        if not each.name or is_tested_for(type(tracing.modules[path]), name):  # a global is read
            return each
    tracer = tracing.new_tracer()
    tracer.absent = frozenset(known)
    try:
        trace = None if example is None else tracer.trace(tracing.model, example.args, example.kwargs)
    except Exception:  # the model's own too
        trace = None
    read = known.keys() if trace is None else known.keys() & trace.checks.read_first
    return known[min(read)] if read else None


def _assigned_in_other_mode(example: Example, tracing: ModelTracing) -> set[Attribute] | None:
    tracer = tracing.new_tracer()
    tracer.training = not tracing.training
    return assigned_by_two_calls(tracer, tracing.model, (example.args, example.kwargs))
