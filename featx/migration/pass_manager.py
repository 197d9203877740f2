"""Passes that say what they did in a `PassResult`, and a manager that runs them, with the surface of torch.fx's."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, overload

from torch import nn

from featx.errors import ArgumentTypeError, PassError
from featx.module import GraphModule
from featx.passes.cse import eliminate_common_subexpressions
from featx.passes.manager import in_order, name_of, this_before_that

Constraint: TypeAlias = Callable[[Any, Any], bool]


class PassResult(NamedTuple):
    """What a pass gives: the module, which may be another one, and whether it changed anything."""

    graph_module: Any  # Any: a GraphModule as a rule; torch.fx's passes may give any module
    modified: bool


class PassBase(abc.ABC):
    """A pass with checks before and after it: calling it runs `requires`, `call` and `ensures`."""

    def __call__(self, graph_module: GraphModule) -> PassResult | None:  # noqa: D102 - said above
        self.requires(graph_module)
        result = self.call(graph_module)
        self.ensures(graph_module)
        return result

    @abc.abstractmethod
    def call(self, graph_module: GraphModule) -> PassResult | None:
        """Do what the pass is for."""

    def requires(self, graph_module: GraphModule) -> None:  # noqa: B027 - an override may check something
        """Raise if the pass cannot run on this module."""

    def ensures(self, graph_module: GraphModule) -> None:  # noqa: B027 - as above
        """Raise if the pass did not do what it should."""


class CSEPass(PassBase):
    """Merges common subexpressions; see `featx.passes.eliminate_common_subexpressions`.

    `banned_ops` is not used: what may be merged is known from the effects of each call.
    """

    def __init__(self, banned_ops: Iterable[Any] | None = None) -> None:
        self.banned_ops = set(banned_ops or ())

    def call(self, graph_module: GraphModule) -> PassResult:
        """Merge in place."""
        return PassResult(graph_module, eliminate_common_subexpressions(graph_module))


@overload
def pass_result_wrapper(fn: None) -> None: ...


@overload
def pass_result_wrapper(fn: Callable[..., Any]) -> Callable[..., PassResult]: ...


def pass_result_wrapper(fn: Callable[..., Any] | None) -> Callable[..., PassResult] | None:
    """Return `fn` as a pass that gives a `PassResult`: of the module it returns, or that it got if it returns None.

    None, for a pass that somebody has left out, stays None.
    """
    if fn is None:
        return None

    @functools.wraps(fn, updated=())
    def wrapped(gm: Any) -> PassResult:
        return _result_of(fn(gm), gm, fn)

    wrapped.__name__ = name_of(fn)
    return wrapped


def this_before_that_pass_constraint(this: Callable[..., Any], that: Callable[..., Any]) -> Constraint:
    """Return the constraint that `this` runs before `that`."""
    return this_before_that(this, that)


class PassManager:
    """Runs passes over a module, in an order that satisfies the constraints.

    Args:
        passes: functions of a module that return a `PassResult`, or, as featx's own, whether they changed anything.
        constraints: functions of two passes that say whether the first may run before the second.
        steps: how often all of them run; it ends early when none changed anything.
        run_checks_after_each_pass: whether the check of `add_checks` runs, and the graph is linted, after each pass.
        suppress_check_failures: not used, as in torch.fx.
    """

    steps: int = 1

    def __init__(
        self,
        passes: list[Callable[..., Any]] | None = None,
        constraints: list[Constraint] | None = None,
        steps: int | None = None,
        run_checks_after_each_pass: bool = False,
        suppress_check_failures: bool = False,
    ) -> None:
        self.passes = passes or []
        self.constraints = constraints or []
        if steps:
            self.steps = steps
        self.run_checks_after_each_pass = run_checks_after_each_pass
        self.suppress_check_failures = suppress_check_failures
        self._is_ordered = False
        self._check: Callable[[nn.Module], None] | None = None

    def add_pass(self, _pass: Callable[..., Any]) -> None:
        """Add a pass at the end."""
        self.passes.append(_pass)
        self._is_ordered = False

    def add_constraint(self, constraint: Constraint) -> None:
        """Add a constraint."""
        self.constraints.append(constraint)
        self._is_ordered = False

    def add_checks(self, check: Callable[[nn.Module], None]) -> None:
        """Let `check` run before the first pass and, with `run_checks_after_each_pass`, after each.

        Raises:
            ArgumentTypeError: it takes another number of arguments than one.
        """
        if len(inspect.signature(check).parameters) != 1:
            raise ArgumentTypeError(f"the check {name_of(check)!r} must take one argument, the module")
        self._check = check

    def check(self, module: nn.Module) -> None:
        """Run the check of `add_checks`, if there is one; it raises if something is wrong with `module`."""
        if self._check is not None:
            self._check(module)

    def validate_constraints(self) -> None:
        """Check the present order.

        Raises:
            PassError: a pass stands before one that must run first.
        """
        for place, first in enumerate(self.passes):
            for second in self.passes[place + 1 :]:
                if not self._may_precede(first, second):
                    raise PassError(f"'{name_of(second)}' must run before '{name_of(first)}'; call solve_constraints()")
        self._is_ordered = True

    def solve_constraints(self) -> None:
        """Put the passes into an order that satisfies the constraints, and change the present one no further.

        Raises:
            PassError: there is none.
        """
        self.passes = in_order(self.passes, self.constraints)
        self._is_ordered = True

    def __call__(self, module: Any) -> PassResult:
        """Run the passes; each gets what the one before it gave.

        Raises:
            PassError: a pass raised, or gave something else than a `PassResult` or a bool; the message names it.
        """
        if not self._is_ordered:
            self.solve_constraints()
        self.check(module)
        modified_ever = False
        for _ in range(self.steps):
            modified = False
            for function in self.passes:
                result = self._run(function, module)
                module, modified = result.graph_module, modified or result.modified
            modified_ever = modified_ever or modified
            if not modified:
                break
        return PassResult(module, modified_ever)

    def _run(self, function: Callable[..., Any], module: Any) -> PassResult:
        try:
            value = function(module)
            if value is None or isinstance(value, nn.Module):
                raise PassError("it gives no PassResult; wrap it with pass_result_wrapper")
            result = _result_of(value, module, function)
            if self.run_checks_after_each_pass:
                self.check(result.graph_module)
                if isinstance(result.graph_module, GraphModule):
                    result.graph_module.graph.lint()
        except Exception as error:
            raise PassError(f"pass '{name_of(function)}' failed: {type(error).__name__}: {error}") from error
        return result

    def _may_precede(self, first: Callable[..., Any], second: Callable[..., Any]) -> bool:
        return all(constraint(first, second) for constraint in self.constraints)


def _result_of(value: Any, module: Any, function: Callable[..., Any]) -> PassResult:
    if value is None:
        return PassResult(module, True)
    if isinstance(value, bool):
        return PassResult(module, value)
    if isinstance(value, nn.Module):
        return PassResult(value, True)
    if hasattr(value, "graph_module") and hasattr(value, "modified"):
        return PassResult(value.graph_module, value.modified)
    raise PassError(f"pass '{name_of(function)}' gave a {type(value).__name__}; expected a PassResult")
