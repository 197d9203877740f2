"""What a run is set up with, and how that changes where a run finds that it has to be set up differently."""

from __future__ import annotations

from collections.abc import Collection

from featx.tracing.example.trace import ExampleTrace
from featx.tracing.replica.model_context import ModelContext, ModelTensors
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.signals import (
    NeedsConversionTracking,
    NeedsFixedKeys,
    NeedsPlainValueChecks,
    NeedsSharedInputs,
    ReadOrderUnknown,
    Restart,
    WritesSharedTensor,
)


class RunSetup:
    """What the runs of one trace are set up with.

    Args:
        copied: which tensors of the model the replica has copies of: "none", "buffers" or "all".
        absent: attributes that are taken away for the runs, unless forward reads them.
        read_first: attributes that are not, because forward is known to read them before it assigns them.
        share_stand_ins: whether one tensor that is two inputs gets one stand-in.
    """

    def __init__(
        self, copied: str, absent: Collection[Attribute], read_first: Collection[Attribute], *, share_stand_ins: bool
    ) -> None:
        self._copied = copied
        self._share_stand_ins = share_stand_ins
        # Attributes that are taken away for the run, because forward seems to assign them before it reads them; and
        # those of which a run without them has shown the contrary.
        self._absent: set[Attribute] = set(absent)
        self._read_first: set[Attribute] = set(read_first)

    def replica(self, context: ModelContext, training: bool | None) -> tuple[Replica, ModelTensors]:
        """Return a new replica for the next run, and its tensors."""
        return context.replica(training, self._copied)

    def apply(self, trace: ExampleTrace, *, is_first_call: bool) -> None:
        """Prepare a run."""
        trace.inputs.share_stand_ins = self._share_stand_ins
        if is_first_call:
            trace.checks.absent, trace.checks.read_first = self._absent, self._read_first

    def absent_named(self, name: str | None) -> Collection[Attribute]:
        """Return the attributes called `name` that were taken away."""
        return {attribute for attribute in self._absent if attribute[1] == name}

    def note_read_first(self, attributes: Collection[Attribute]) -> None:
        """Take note that forward reads attributes before it assigns them."""
        self._absent, self._read_first = self._absent.difference(attributes), self._read_first.union(attributes)

    def change(self, restart: Restart, context: ModelContext) -> None:
        """Change what a run has asked to change."""
        if isinstance(restart, NeedsConversionTracking):
            context.converting.append(restart.namespace)
        elif isinstance(restart, NeedsFixedKeys):
            context.fixes_keys = True
        elif isinstance(restart, WritesSharedTensor):
            self._copied = "all"
        elif isinstance(restart, NeedsPlainValueChecks):
            context.checks_plain_values = True
        elif isinstance(restart, NeedsSharedInputs):
            self._share_stand_ins = True
        elif isinstance(restart, ReadOrderUnknown):  # where forward reads it ahead of that, it will be missing
            self._absent = {*self._absent, restart.attribute}
