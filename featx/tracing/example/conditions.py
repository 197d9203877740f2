"""Why and under which conditions a model runs in a trace, and who finds what is requested of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.guards.disguises import Disguise, disguise_as_larger

if TYPE_CHECKING:
    from featx.tracing.example.trace import ExampleTrace


class RequestedNodeFinder(Protocol):
    """Finds the requested nodes in a graph that may be incomplete."""

    def __call__(self, graph: Graph, failed_module_path: str) -> Collection[Node]:
        """Return the requested nodes of the graph so far, or none where one is missing.

        `failed_module_path` is the path of the innermost module that failed.
        """
        ...

    def last_needed(self, graph: Graph) -> Node | None:
        """Return the last node of a whole graph that matters for the requested ones, if they are all there."""
        ...


@dataclass(frozen=True)
class Conditions:
    """Why and under which conditions a model runs.

    Attributes:
        reason: why it runs, for the log.
        is_real: on real tensors, or on those without values.
        gradients: whether gradients are switched on.
        earlier: a finished trace that this run is compared with: it ends with `Diverged` where it does something else.
        disguise: what C code sees in place of the numbers that are others than in `earlier`.
        disguised: positions of further numbers that are disguised.
        dtype: the dtype that floating-point weights and buffers are taken to be of, in a trace without values.
        is_complete: a run that is compared with `earlier` goes to its end, and another call on its replica may follow;
            otherwise it ends when all that is needed is recorded, and drops its replica.
        before: this run is the next call on the replica of that trace, which must not have been dropped.
        is_recorded: a call on that replica is recorded, for another one to be compared with it, as a first call is.
    """

    reason: str
    is_real: bool
    gradients: bool = True
    earlier: ExampleTrace | None = None
    disguise: Disguise = disguise_as_larger
    disguised: frozenset[int] = frozenset()
    dtype: torch.dtype | None = None
    is_complete: bool = False
    before: ExampleTrace | None = None
    is_recorded: bool = False

    @property
    def drops_replica(self) -> bool:
        """Whether the replica is of no use when the run is over."""
        return self.earlier is not None and self.before is None and not self.is_complete

    @property
    def is_further(self) -> bool:
        """Whether another run has traced the model, and this one tells more of it."""
        return self.earlier is not None or self.before is not None
