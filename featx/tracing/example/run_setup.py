"""What a run is set up with, and how that changes where a run finds that it has to be set up differently."""

from __future__ import annotations

from dataclasses import dataclass

from featx.tracing.replica.model_context import ModelContext
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


@dataclass
class RunSetup:
    """What the runs of one trace are set up with.

    Attributes:
        copied: which tensors of the model the replica has copies of: "none", "buffers" or "all".
        absent: attributes that are taken away for the runs, because forward seems to assign them before it reads them.
        read_first: attributes that are not, because forward is known to read them before it assigns them.
        share_stand_ins: whether one tensor that is two inputs gets one stand-in.
    """

    copied: str
    absent: set[Attribute]
    read_first: set[Attribute]
    share_stand_ins: bool

    def change(self, restart: Restart, context: ModelContext) -> None:
        """Change what a run has asked to change."""
        if isinstance(restart, NeedsConversionTracking):
            context.converting.append(restart.namespace)
        elif isinstance(restart, NeedsFixedKeys):
            context.fixes_keys = True
        elif isinstance(restart, WritesSharedTensor):
            self.copied = "all"
        elif isinstance(restart, NeedsPlainValueChecks):
            context.checks_plain_values = True
        elif isinstance(restart, NeedsSharedInputs):
            self.share_stand_ins = True
        elif isinstance(restart, ReadOrderUnknown):  # where forward reads it ahead of that, it will be missing
            self.absent.add(restart.attribute)
