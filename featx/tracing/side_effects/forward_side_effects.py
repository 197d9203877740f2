"""Find side effects of forward on its module that a graph cannot reproduce."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    effects = _ForwardEffects(checks, recorder, module, state, path, must_open)
    return (
        effects.changed_value()
        or effects.tested_attribute()
        or effects.grown_container()
        or effects.rebound_buffer()
        or effects.replaced_item()
        or effects.assigned_tensor()
        or effects.assigned_number()
        or ("forward draws from a random generator of its own" if state.drawn_generators() else None)
    )


@dataclass(frozen=True)
class _ForwardEffects:
    """What forward has left on one module, a method for each kind of effect.

    Each returns the first one that no graph reproduces, or None. Where the module must be opened, and the effect may be
    a cache, it is noted instead: a second call tells.
    """

    checks: StateChecks
    recorder: Recorder
    module: nn.Module
    state: ModuleState
    path: str
    must_open: bool

    def changed_value(self) -> str | None:
        """A number, text or object that was an attribute before."""
        for name, holder in self.state.changed_values():
            if self.checks.is_only_stored(name):
                continue
            what = (
                f"forward changes the attribute '{name}' (if its first call alone does so, call the model once before)"
            )
            if not self.must_open and not self.checks.is_held_by_opened(holder):
                return what
            self.checks.note_cache(self.path, what, ())
        return None

    def tested_attribute(self) -> str | None:
        """A new attribute, where code asks whether it is there."""
        for name in self.state.new_attributes():
            if is_tested_for(type(self.module), name):
                what = f"forward tests whether it has already created the attribute '{name}',"
                if not self.must_open:
                    return what
                self.checks.note_cache(self.path, what, [AttributePath(name, name)])
        return None

    def grown_container(self) -> None:
        """Items that were added to a list, dict or set, or removed. They are noted and never refused here."""
        for name, added in self.state.grown_containers():
            if self.checks.is_only_stored(name) or self._is_table_by_size(added):
                continue
            # A second call tells whether it finds them there, and whether there are more of them after each call.
            what = f"forward adds to '{name}' or removes items from it,"
            self.checks.note_cache(self.path, what, computed_attributes(self.recorder, self.state))

    def _is_table_by_size(self, added: Iterable[Any]) -> bool:
        """Say whether items are made from sizes and constants alone, so that a graph makes them anew."""
        recorder = self.recorder
        if all(id(value) in recorder.earlier.constants for value in added):
            return True
        origins = [recorder.lineage.get(value) for value in added]
        return all(origin is not None and not depends_on_inputs(recorder.node_of(origin)) for origin in origins)

    def rebound_buffer(self) -> str | None:
        """A buffer that holds another tensor than before."""
        recorder = self.recorder
        for name, value in self.state.rebound_buffers(recorder.is_made_here).items():
            before = self.state.buffer(name)
            if recorder.stand_ins.is_stand_in_of(value, before) or (before is not None and is_alias(value, before)):
                continue  # `self.table = self.table.to(x.device)` assigns what was there
            what = f"forward assigns a new tensor to the buffer '{name}'"
            if not self.must_open or is_persistent(self.module, name) or is_from_inputs(recorder, value):
                return what
            self.checks.note_cache(self.path, what, [AttributePath(name, name)])
        return None

    def replaced_item(self) -> None:
        """A value of the inputs that took the place of another in a container: it is noted and never refused here."""
        for name, value in self.state.replaced_items():
            if is_from_inputs(self.recorder, value):
                # A second call tells whether it is read there before it is replaced again.
                self.checks.kept_input_message = f"forward stores a value computed from its input in '{name}'"

    def assigned_tensor(self) -> str | None:
        """A value of the inputs in an attribute that the next call reads."""
        for name, value in self.state.assigned_tensors():
            if not is_read(type(self.module), name) or not is_from_inputs(self.recorder, value):
                continue
            # What was not there at all was assigned before it was read, unless the code asks whether it is there.
            if is_tested_for(type(self.module), name) or (
                self.state.had(name) and self.checks.require_read_order((self.path, name))
            ):
                return (
                    f"forward stores an input-dependent value in the attribute '{name}', and reads it in the next call"
                )
        return None

    def assigned_number(self) -> str | None:
        """A number in an attribute that the next call reads."""
        for name in self.state.assigned_numbers():
            if is_read(type(self.module), name) and self.checks.require_read_order((self.path, name)):
                what = f"forward stores a number in the attribute '{name}', and reads it in the next call"
                if not self.must_open or is_from_inputs(self.recorder, self.module.__dict__[name]):
                    return what
                self.checks.note_cache(self.path, what, [AttributePath(name, name)])
        return None


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
