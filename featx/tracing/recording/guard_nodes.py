"""Add checks to the graph of a trace: that a later run sees what Python saw in this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from featx.ir.form import computes_form, reads_form
from featx.ir.node import Node
from featx.tracing.guards.forms import attributes_given_to, form_of, form_of_result
from featx.tracing.guards.guards import (
    aliases_of,
    check_decision,
    check_form,
    check_is_tensor,
    check_result,
    check_same_items,
)
from featx.tracing.recording.later_calls import LaterCalls
from featx.tracing.signals import Untraceable
from featx.tracing.source.frames import describe

if TYPE_CHECKING:
    from featx.tracing.recording.recorder import Recorder


class GuardNodes:
    """Adds the checks of one trace to its graph.

    Args:
        recorder: makes the nodes.
        later_calls: knows which modules may be called after a decision.
    """

    def __init__(self, recorder: Recorder, later_calls: LaterCalls) -> None:
        self._recorder = recorder
        self._later_calls = later_calls

    def add(self, node: Node, value: Any, what: str, *, when_compiled: str = "check") -> Node:
        """Add a check that the value of a node is again what Python saw; see `check_decision`."""
        frame = self._recorder.model_frame()
        where = f" {describe(frame)}" if frame is not None else ""
        arguments = (node, value, f"{what}{where}", *([] if when_compiled == "check" else [when_compiled]))
        check = self._recorder.add_unnamed_node("call_function", check_decision, arguments, {}, None)
        check.meta["is_guard"] = True
        later = self._later_calls.after_decision(frame, self._recorder.scope.module_path) if frame is not None else ()
        if later:
            check.meta["may_call"] = later
        return check

    def add_for_form(self, node: Node, value: Any, what: str) -> None:
        """Add a check that the value of a node has the same containers, keys and lengths again."""
        self._check_form(node, check_form, form_of(value), what)

    def add_for_result(
        self, node: Node, value: Any, what: str, *, have_values: bool, follows_from: str | None = None
    ) -> None:
        """Add a check that a result is nested again as it is, and holds the same besides tensors and numbers.

        Args:
            node: the call.
            value: what it returned.
            what: names that.
            have_values: whether the call got tensors with values.
            follows_from: from what the form of the result follows, "nothing" or "sizes"; None if that is not known.

        Raises:
            Untraceable: there is an object in it that may depend on values, and of which no check can tell.
        """
        form, form_with_contents = form_of(value), form_of_result(value)
        if isinstance(value, torch.Tensor) and not attributes_given_to(value):
            self._check_form(node, check_is_tensor, what, follows_from=follows_from)
        elif form_with_contents == form:
            self._check_form(node, check_form, form, what, follows_from=follows_from)
        elif form_with_contents is not None:
            self._check_form(node, check_result, form_with_contents, what, follows_from=follows_from)
        elif have_values:
            raise Untraceable(f"{what} contains an object that cannot be compared with that of a later call,")
        else:  # a trace at other sizes tells whether it depends on those
            self._recorder.numbers.sizes_were_read = True
        aliases = aliases_of(value)
        if len(set(aliases)) < len(aliases):  # Python holds one object, and so there is one node for them
            self._check_form(node, check_same_items, aliases, what, follows_from=follows_from)

    def _check_form(
        self, node: Node, check: Callable[..., None], *arguments: Any, follows_from: str | None = None
    ) -> None:
        added = self._recorder.add_unnamed_node("call_function", check, (node, *arguments), {})
        added.meta["is_guard"] = added.meta["is_form_check"] = True
        if follows_from is not None:
            added.meta["form_follows_from"] = follows_from


def is_about_values(guard: Node) -> bool:
    """Say whether a check is one of a decision that Python makes by values, and not by sizes or dtypes alone."""
    pending = list(guard.all_input_nodes) if guard.target is check_decision else []
    while pending:
        node = pending.pop()
        if not computes_form(node):
            return True
        pending += [] if reads_form(node) else node.all_input_nodes
    return False
