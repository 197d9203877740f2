"""What a run is set up with, and how that changes where a run finds that it has to be set up differently."""

from __future__ import annotations

from dataclasses import dataclass

from featx.tracing.replica.model_context import ModelContext
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.signals import (
    ChangesOuterValues,
    NeedsConversionTracking,
    NeedsDrawsPutBack,
    NeedsFixedKeys,
    NeedsHooks,
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

    def put_back_missing(self, error: Exception) -> bool:
        """Leave an attribute in place in later runs, if forward has missed it; say whether the error tells of one."""
        missing = {attribute for attribute in self.absent if attribute[1] == getattr(error, "name", None)}
        self.absent -= missing
        self.read_first |= missing
        return bool(missing)

    def change(self, restart: Restart, context: ModelContext) -> None:
        """Change what a run has asked to change."""
        match restart:
            case NeedsConversionTracking():
                context.converting.append(restart.namespace)
            case NeedsFixedKeys():
                context.fixes_keys = True
            case WritesSharedTensor():
                self.copied = "all"
            case NeedsPlainValueChecks():
                context.checks_plain_values = True
            case NeedsDrawsPutBack():
                context.puts_back_draws = True
            case NeedsSharedInputs():
                self.share_stand_ins = True
            case ReadOrderUnknown():  # where forward reads it before that, it will be missing
                self.absent.add(restart.attribute)
            case NeedsHooks() | ChangesOuterValues():
                pass  # noted where they are raised and caught
            case _:  # it would start again for ever
                raise AssertionError(f"nothing changes for {type(restart).__name__}")
