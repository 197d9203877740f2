"""Run passes in an order that respects constraints, and check the graph after each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from featx.errors import ArgumentTypeError, PassError
from featx.module import GraphModule

Pass: TypeAlias = Callable[[GraphModule], bool]
# Says whether the first of two passes may run before the second one.
Constraint: TypeAlias = Callable[[Pass, Pass], bool]


def this_before_that(this: Pass, that: Pass) -> Constraint:
    """Return the constraint that `this` runs before `that`."""
    return lambda first, second: not (first == that and second == this)


class PassManager:
    """Runs passes over a graph module, each in place.

    Args:
        passes: functions that take a `GraphModule`, edit it and return whether they changed anything.
        constraints: functions of two passes that say whether the first may run before the second, such as
            `this_before_that(a, b)` makes. Where they leave a choice, the order of `passes` stays.
        steps: how often to run all passes; it ends early when none of them changed anything.

    Raises:
        ArgumentTypeError: a pass or constraint cannot be called, or `steps` is not a positive int.
        PassError: no order satisfies the constraints.
    """

    def __init__(self, passes: Sequence[Pass], constraints: Sequence[Constraint] = (), steps: int = 1) -> None:
        for function in (*passes, *constraints):
            if not callable(cast(object, function)):
                raise ArgumentTypeError(f"a pass or constraint must be a function, got {function!r}")
        if not isinstance(cast(object, steps), int) or steps < 1:
            raise ArgumentTypeError(f"steps must be a positive int, got {steps!r}")
        self.passes = _in_order(list(passes), constraints)
        self.steps = steps

    def run(self, gm: GraphModule) -> bool:
        """Run the passes over `gm`, checking its graph after each, and return whether any of them changed it.

        Raises:
            PassError: a pass raised, returned something else than a bool, or left a malformed graph; it says which.
        """
        changed_ever = False
        for _ in range(self.steps):
            changed = False
            for function in self.passes:
                changed = _run(function, gm) or changed
            changed_ever = changed_ever or changed
            if not changed:
                break
        return changed_ever


def _run(function: Pass, gm: GraphModule) -> bool:
    name = _name_of(function)
    try:
        changed = cast(object, function(gm))
    except Exception as error:
        raise PassError(f"pass '{name}' raised {type(error).__name__}: {error}") from error
    if not isinstance(changed, bool):
        raise PassError(
            f"pass '{name}' returned {type(changed).__name__}; a pass edits the module that it gets and returns "
            "whether it changed anything"
        )
    try:
        gm.graph.lint()
    except Exception as error:
        raise PassError(f"pass '{name}' broke the graph: {error}") from error
    return changed


def _in_order(passes: list[Pass], constraints: Sequence[Constraint]) -> list[Pass]:
    """Return `passes` in the first order, by their places in the list, that satisfies the constraints."""
    later: list[list[int]] = [[] for _ in passes]
    waiting = [0] * len(passes)
    for one, first in enumerate(passes):
        for other, second in enumerate(passes):
            if one != other and not all(constraint(second, first) for constraint in constraints):
                later[one].append(other)
                waiting[other] += 1
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        order.append(index := heapq.heappop(ready))
        for other in later[index]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, other)
    if len(order) < len(passes):
        stuck = [_name_of(function) for index, function in enumerate(passes) if index not in set(order)]
        raise PassError(f"no order of the passes satisfies the constraints between {', '.join(stuck)}")
    return [passes[index] for index in order]


def _name_of(function: Pass) -> str:
    return str(getattr(function, "__name__", function))
