"""What a run needs to know of its graph, found once, and what it puts back afterwards."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.amp import autocast_mode

from featx.ir.graph import Graph
from featx.ir.node import Node

_SET_GRADIENTS = torch._C._set_grad_enabled
_ENTER_AUTOCAST = autocast_mode._enter_autocast
_LABEL = attrgetter("label")


class Plan:
    """What is known of `graph` as it is now; stale once `graph.edits` differs from `edits`. O(nodes + edges)."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.edits = graph.edits
        self.inputs: list[Node] = []
        # The nodes that change modes of the thread, which outlast a run that fails.
        self.switches: list[Node] = []
        # For each node the values that nothing reads after it; values that nothing reads at all are left out.
        self.last_uses: dict[Node, list[Node]] = {}
        last_uses = self.last_uses
        for node in graph.nodes:
            users = node.users
            if users:
                user = next(iter(users)) if len(users) == 1 else max(users, key=_LABEL)
                if user in last_uses:
                    last_uses[user].append(node)
                else:
                    last_uses[user] = [node]
            target = node.target
            if node.op == "placeholder":
                self.inputs.append(node)
            elif target is _SET_GRADIENTS or target is _ENTER_AUTOCAST:
                self.switches.append(node)


@contextmanager
def modes_restored(switches: Iterable[Node], env: Mapping[Node, Any]) -> Generator[None]:
    """Put back the modes that `switches` change, as the generated code does. `env` has the values of what has run."""
    switches = list(switches)
    grad_enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        if any(node.target is _SET_GRADIENTS for node in switches):
            torch._C._set_grad_enabled(grad_enabled)
        for node in reversed(switches):
            region = env.get(node)
            if isinstance(region, torch.autocast) and not any(user in env for user in node.users):
                autocast_mode._exit_autocast(region)
