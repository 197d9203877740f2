"""Run passes in an order that respects constraints, and check what each of them leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from featx.errors import ArgumentTypeError, PassError
from featx.module import GraphModule, check_graph_module
from featx.passes.ordering import first_order

Pass: TypeAlias = Callable[[GraphModule], bool]
# Says whether the first of two passes may run before the second one.
Constraint: TypeAlias = Callable[[Pass, Pass], bool]
# Raises where a module is not as it must be.
Check: TypeAlias = Callable[[GraphModule], object]
_P = TypeVar("_P", bound=Callable[..., Any])


def this_before_that(this: Pass, that: Pass) -> Constraint:
    """Return the constraint that `this` runs before `that`."""
    return lambda first, second: not (first == that and second == this)


class PassManager:
    """Runs passes over a graph module, each in place.

    Args:
        passes: functions that take a `GraphModule`, edit it and return whether they changed anything.
        constraints: functions of two passes that say whether the first may run before the second, such as
            `this_before_that(a, b)` makes. Where they leave a choice, the order of `passes` stays.
        checks: functions of the module that raise where it is not as it must be.
        steps: how often to run all passes; it ends early when none of them changed anything.

    Raises:
        ArgumentTypeError: a pass, constraint or check cannot be called, or `steps` is not a positive int.
        PassError: no order satisfies the constraints.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        constraints: Sequence[Constraint] = (),
        checks: Sequence[Check] = (),
        steps: int = 1,
    ) -> None:
        for function in (*passes, *constraints, *checks):
            if not callable(cast(object, function)):
                raise ArgumentTypeError(f"a pass, constraint or check must be a function, got {function!r}")
        if not isinstance(cast(object, steps), int) or steps < 1:
            raise ArgumentTypeError(f"steps must be a positive int, got {steps!r}")
        self.passes = in_order(list(passes), constraints)
        self.checks = tuple(checks)
        self.steps = steps

    def run(self, gm: GraphModule) -> bool:
        """Run the passes over `gm` and return whether any of them changed it.

        The graph is verified, and the checks are run, before the first pass and after each. Where something raises, the
        passes before it have been run.

        Raises:
            PassError: a pass or check raised, or a pass returned something else than a bool; it says which pass.
        """
        self._check(check_graph_module(gm), "before any pass")
        changed_ever = False
        for _ in range(self.steps):
            changed = [self._run(function, gm) for function in self.passes]
            changed_ever = changed_ever or any(changed)
            if not any(changed):
                break
        return changed_ever

    def _run(self, function: Pass, gm: GraphModule) -> bool:
        name = name_of(function)
        changed = cast(object, _guarded(f"pass '{name}'", function, gm))
        if not isinstance(changed, bool):
            raise PassError(
                f"pass '{name}' returned {type(changed).__name__}; a pass edits the module that it gets and returns "
                "whether it changed anything"
            )
        self._check(gm, f"after pass '{name}'")
        return changed

    def _check(self, gm: GraphModule, when: str) -> None:
        _guarded(f"{when}, lint", lambda module: module.graph.lint(), gm)
        for check in self.checks:
            _guarded(f"{when}, check '{name_of(check)}'", check, gm)


def _guarded(what: str, function: Callable[[GraphModule], Any], gm: GraphModule) -> Any:
    try:
        return function(gm)
    except Exception as error:
        raise PassError(f"{what} raised {type(error).__name__}: {error}") from error


def in_order(passes: Sequence[_P], constraints: Sequence[Callable[[_P, _P], bool]]) -> list[_P]:
    """Return `passes` in the first order, by their places in the list, that satisfies the constraints.

    A constraint says whether the first of two passes may run before the second one. O(passes^2 * constraints).

    Raises:
        PassError: there is none.
    """
    places = range(len(passes))
    edges = [
        (one, other)
        for one in places
        for other in places
        if one != other and not all(constraint(passes[other], passes[one]) for constraint in constraints)
    ]
    order = first_order(len(passes), edges)
    if len(order) < len(passes):
        stuck = [name_of(passes[place]) for place in places if place not in order]
        raise PassError(f"no order of the passes satisfies the constraints between {', '.join(stuck)}")
    return [passes[place] for place in order]


def name_of(function: Callable[..., Any]) -> str:
    """Return what errors call a pass, constraint or check."""
    return str(getattr(function, "__name__", type(function).__name__))
