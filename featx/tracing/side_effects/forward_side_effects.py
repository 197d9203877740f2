"""Find side effects of forward on its module that a graph cannot reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from featx.ir.form import FORM_ATTRIBUTES, sources_of_values
from featx.ir.node import Node
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.history.lineage import Origin, Part
from featx.tracing.model_state.module_state import AttributePath, ModuleState, is_alias
from featx.tracing.recording.recorder import Recorder
from featx.tracing.source.attributes import is_read, is_tested_for

if TYPE_CHECKING:
    from featx.tracing.side_effects.state_checks import StateChecks


def unsupported_side_effect(
    checks: StateChecks, recorder: Recorder, module: nn.Module, state: ModuleState, *, is_called: bool
) -> str | None:
    """Say what the forward of an opened module left there, where a graph of it would not do the same; else None.

    Writing into a buffer is fine, and so is an attribute that no code reads, a list to which it adds and a counter too,
    or one that is made from sizes and constants alone: a graph makes it anew.
    """
    path = checks.paths[module]
    # A module of which others call methods alone cannot be kept whole.
    must_open = checks.must_open(path) or not is_called
    for name, holder in state.changed_values():
        if checks.is_only_stored(name):
            continue
        what = f"forward changes the attribute '{name}' (if its first call alone does so, call the model once before)"
        if not must_open and not checks.is_held_by_opened(holder):
            return what
        checks.note_cache(path, what, ())
    for name in state.new_attributes():
        if is_tested_for(type(module), name):
            what = f"forward tests whether it has already created the attribute '{name}',"
            if not must_open:
                return what
            checks.note_cache(path, what, [AttributePath(name, name)])
    for name, added in state.grown_containers():
        if checks.is_only_stored(name):
            continue
        origins = [recorder.lineage.get(value) for value in added]
        # A table by size is made anew by the graph.
        are_constants = all(id(value) in recorder.earlier.constants for value in added)
        if not are_constants and not all(
            origin is not None and not depends_on_inputs(recorder.node_of(origin)) for origin in origins
        ):
            # A second call tells whether it finds them there, and whether there are more of them after each call.
            what = f"forward adds to '{name}' or removes items from it,"
            checks.note_cache(path, what, computed_attributes(recorder, state))
    for name, value in state.rebound_buffers(recorder.is_made_here).items():
        before = state.buffer(name)
        # `self.table = self.table.to(x.device)` assigns what was there.
        if not recorder.stand_ins.is_stand_in_of(value, before) and not (
            before is not None and is_alias(value, before)
        ):
            what = f"forward assigns a new tensor to the buffer '{name}'"
            if not must_open or is_persistent(module, name) or is_from_inputs(recorder, value):
                return what
            checks.note_cache(path, what, [AttributePath(name, name)])
    for name, value in state.replaced_items():
        if is_from_inputs(recorder, value):
            # A second call tells whether it is read there before it is replaced again.
            checks.kept_input_message = f"forward stores a value computed from its input in '{name}'"
    for name, value in state.assigned_tensors():
        if not is_read(type(module), name) or not is_from_inputs(recorder, value):
            continue
        # What was not there at all was assigned before it was read, unless the code asks whether it is there.
        if is_tested_for(type(module), name) or (state.had(name) and checks.require_read_order((path, name))):
            return f"forward stores an input-dependent value in the attribute '{name}', and reads it in the next call"
    for name in state.assigned_numbers():
        if is_read(type(module), name) and checks.require_read_order((path, name)):
            what = f"forward stores a number in the attribute '{name}', and reads it in the next call"
            if not must_open or is_from_inputs(recorder, module.__dict__[name]):
                return what
            checks.note_cache(path, what, [AttributePath(name, name)])
    return "forward draws from a random generator of its own" if state.drawn_generators() else None


def is_persistent(module: nn.Module, name: str) -> bool:
    """Say whether a buffer is a part of the state dict of its module."""
    return name not in module._non_persistent_buffers_set


def computed_attributes(recorder: Recorder, state: ModuleState) -> set[AttributePath]:
    """Return the attributes of a module, and the items in them, that hold what its forward has computed.

    A graph assigns no attributes. Its own call may have assigned them before it has read them; other graphs of the
    model, for the other mode or for other inputs, may read them without that.
    """
    return {
        place
        for place, value in state.assigned_values()
        if isinstance(value, (bool, TracedNumber)) or is_from_inputs(recorder, value)
    }


def is_from_inputs(recorder: Recorder, value: object) -> bool:
    """Say whether a value is computed from values of the inputs. No node is made for a part that nothing uses."""
    origin = recorder.lineage.get(value)
    return origin is not None and comes_from_inputs(origin)


def comes_from_inputs(origin: Origin) -> bool:
    """Do as `depends_on_inputs`, for a part of a value too: `x.shape` is a form, and no value."""
    while isinstance(origin, Part):
        if origin.key in FORM_ATTRIBUTES:
            return False
        origin = origin.owner
    return depends_on_inputs(origin)


def depends_on_inputs(node: Node) -> bool:
    """Say whether a value is computed from values of the inputs, and not from their sizes alone."""
    seen = {node}
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            return True
        fresh = [source for source in sources_of_values(node) if source not in seen]
        seen.update(fresh)
        pending += fresh
    return False
