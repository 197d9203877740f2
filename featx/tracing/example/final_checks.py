"""What is checked when forward is over: side effects that a graph of it would not have."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from featx.ir.node import Node
from featx.ir.runtime_checks import is_runtime_check
from featx.libraries import advice_for, advice_for_type_checks, may_check_types
from featx.rebuilding import NO_VALUE
from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.environment.generators import SharedGenerators
from featx.tracing.inputs.run_inputs import RunInputs
from featx.tracing.model_state.tensor_attributes import TensorAttributes
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.objects.structure import AttributeKey, Path, contents_of, text_of
from featx.tracing.recording.recorder import Recorder
from featx.tracing.recording.results import ContentsSnapshot, Results
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.side_effects.state_checks import StateChecks
from featx.tracing.signals import NeedsDrawsPutBack, NeedsPlainValueChecks, ThreadInterference, UnsupportedSideEffect
from featx.tracing.source.frames import Line
from featx.tracing.source.reachable import functions_reached
from featx.tracing.source_uses.code_queries import asks_for_key
from featx.tracing.source_writes.conditional_writes import conditional_writes
from featx.tracing.source_writes.state_writes import StateWrite, possible_state_writes


class FinalChecks:
    """The checks at the end of one run, of what each of its parts has seen."""

    def __init__(
        self,
        context: ModelContext,
        recorder: Recorder,
        results: Results,
        torch_calls: TorchCalls,
        state_checks: StateChecks,
        inputs: RunInputs,
    ) -> None:
        self._context = context
        self._recorder = recorder
        self._results = results
        self._torch_calls = torch_calls
        self._state_checks = state_checks
        self._inputs = inputs

    def check_side_effects(
        self, generators: SharedGenerators, attributes: TensorAttributes, find_returned: Callable[[], Collection[Node]]
    ) -> None:
        """Raise if forward has changed something that a graph of it would not change.

        Args:
            generators: the random generators of Python and numpy.
            attributes: the attributes that tensors of the model had before.
            find_returned: gives the nodes in what the graph is to return, and those that are asked for.

        Raises:
            UnsupportedSideEffect: it has.
            ThreadInterference: another thread may have.
            NeedsDrawsPutBack: something has drawn from Python's generator, perhaps a type check.
            NeedsPlainValueChecks: it has changed a number or text outside of its modules.
        """
        self._state_checks.check_all()
        changed = attributes.changed()
        if changed is not None:
            tensor, name = changed
            path = self._recorder.owned.get(id(tensor), "a tensor")
            raise UnsupportedSideEffect(f"forward sets the attribute '{name}' of '{path}'")
        self._inputs.kinds.check(self.codes_that_may_have_run)
        self._check_objects(find_returned)
        self._torch_calls.check_memory()
        self._torch_calls.check_generator()
        if generators.have_drawn():
            if may_check_types() and not self._context.puts_back_draws:
                raise NeedsDrawsPutBack
            if generators.others_may_have_drawn():
                raise ThreadInterference("a random generator of Python or numpy was drawn from")
            raise UnsupportedSideEffect(
                "forward draws from a random generator of Python or numpy without using a global name",
                advice=advice_for_type_checks(),
            )
        if self._context.puts_back_draws and self._recorder.opaque_call.has_drawn_from_python:
            raise UnsupportedSideEffect(
                "a module that is kept whole draws from a random generator of Python, from which type checks draw too,",
                advice=advice_for_type_checks(),
            )
        if not self._context.checks_plain_values and self._context.caches.changed_plain_value() is not None:
            raise NeedsPlainValueChecks
        self._context.check_plain_values()
        self._check_values_of_calls()

    def _check_values_of_calls(self) -> None:
        """Raise where opened code may read a plain value of a file that a call which is one node has changed."""
        called = self._recorder.called
        for holder, key in self._context.plain_values_of_calls:
            if called is None or any(holder.may_be_read_by(code, names, key) for code, names in called.items()):
                raise UnsupportedSideEffect(
                    f"forward may read the value {key!r} in its Python file or in a class, which a module that is "
                    "kept whole changes,"
                )

    def codes_that_ran(self) -> set[CodeType]:
        """Return the code that has called torch, and that of opened modules."""
        functions = [inspect.unwrap(self._context.function)]
        for module in self._state_checks.opened_modules:
            functions += [type(module).forward, forward_of(module)]  # with and without what decorates it
        codes = (getattr(each, "__code__", None) for each in functions)
        return self._recorder.codes | {code for code in codes if code is not None}

    def codes_that_may_have_run(self) -> set[CodeType]:
        """Return `codes_that_ran`, and the code of functions and methods that opened modules may call. O(code)."""
        return self.codes_that_ran() | {each.__code__ for each in self._functions_that_may_have_run()}

    def _functions_that_may_have_run(self) -> Iterator[FunctionType]:
        """Yield the forward functions of what is traced and of opened modules, and what these may call."""
        own = ((forward_of(module), type(module)) for module in self._state_checks.opened_modules)
        for function, kind in ((self._context.function, type(self._context.root)), *own):
            for reached, _ in functions_reached(function, kind):
                yield reached

    def possible_state_writes(self, failed_path: str, *, for_other_inputs: bool) -> frozenset[StateWrite]:
        """Return what code of opened modules may write of the model's state, and has not written in this run.

        Args:
            failed_path: the path of the innermost module that failed, where forward ended early; else "".
            for_other_inputs: count what code under conditions has written, too: for other inputs it may not run.
        """
        find = functools.partial(possible_state_writes, for_other_inputs=for_other_inputs)
        return self._possible_writes(find, failed_path, self._written_at)

    def conditional_writes(self, failed_path: str, *, for_other_inputs: bool) -> frozenset[StateWrite]:
        """Return what their code under conditions may write in ways that are not followed one by one."""
        return self._possible_writes(conditional_writes, failed_path, {} if for_other_inputs else self._written_at)

    @property
    def _written_at(self) -> Mapping[str, set[Line | None]]:
        """The lines that wrote a tensor in place, by the path of the module that ran."""
        found: dict[str, set[Line | None]] = {}
        for path, line in self._recorder.written_at:
            found.setdefault(path, set()).add(line)
        return found

    def _possible_writes(
        self, find: Callable[..., set[StateWrite]], failed_path: str, written_at: Mapping[str, set[Line | None]]
    ) -> frozenset[StateWrite]:
        opened = self._state_checks.opened_modules
        found = (
            find(module, path, written_at.get(path, ()))
            for module, path in self._state_checks.paths.items()
            if module in opened or f"{failed_path}.".startswith(f"{path}.")
        )
        return frozenset().union(*found)

    def _check_objects(self, find_returned: Callable[[], Collection[Node]]) -> None:
        # Inputs that are objects or containers, and objects that calls have returned.
        for held in self._results.objects:
            missing = held.before.keys() - contents_of(held.container).keys()
            if missing and not self._is_read_in_parts(held, find_returned):  # the graph returns the object as it came
                raise UnsupportedSideEffect(
                    f"forward takes {min(map(repr, missing))} out of {held.what}, a {type(held.container).__name__},",
                    held.container,
                )
        for held in (*self._inputs.contents, *self._results.objects):
            container, before = held.container, held.before
            changed = [key for key, item in contents_of(container).items() if item is not before.get(key, NO_VALUE)]
            if (
                changed
                and not self._are_results(container, before, changed)
                and not self._is_read_in_parts(held, find_returned)
            ):
                # A cache of transformers holds lists of lists.
                around = (
                    each.container
                    for each in self._inputs.contents
                    if each.what == held.what and advice_for(each.container)
                )
                stored_in = next(around, container)
                raise UnsupportedSideEffect(
                    f"forward stores a value in {held.what}, a {type(stored_in).__name__},", stored_in,
                    advice=advice_for(stored_in) or self._advice_for_containers(container, before, changed),
                )  # fmt: skip

    def _is_read_in_parts(self, held: ContentsSnapshot, find_returned: Callable[[], Collection[Node]]) -> bool:
        """Say whether an object is one that a module made in its call, of which the graph uses the tensors alone.

        What forward has stored in it is followed where forward reads it. If the module keeps the object, that is a
        change of its state.
        """
        call = held.call
        return call is not None and call.op == "call_module" and _gives_tensors(call, find_returned(), call)

    def _advice_for_containers(self, container: Any, before: Mapping[Any, Any], changed: list[Any]) -> str:
        """Say what to do about a list or dict of the caller, which an earlier call may have put its results into."""
        if self._is_given(container) and isinstance(container, list):
            return (
                "put the model into a module whose forward makes the list of its own arguments, such as `return "
                "self.model([slow, fast])`"
            )
        left = [key for key in changed if key in before]
        rest = {key: item for key, item in before.items() if key not in left}
        if not left or not self._are_results(container, rest, changed):
            return ""
        return f"give a dict without what an earlier call of the model has added to it: {', '.join(map(repr, left))}"

    def _are_results(self, container: Any, before: Mapping[Any, Any], changed: list[Any]) -> bool:
        """Say whether forward has only added results to a dict that it was given, which no code asks for before that.

        As sentence-transformers does. The dict of the caller stays as it is.
        """
        if not self._is_given(container) or not isinstance(container, dict):
            return False
        if not before or not before.keys().isdisjoint(changed):
            return False
        if any(isinstance(key, AttributeKey) for key in changed):
            return False
        return not any(asks_for_key(code, frozenset(changed)) for code in self.codes_that_ran())

    def _is_given(self, container: object) -> bool:
        return any(container is each.container for each in self._inputs.contents)


def _gives_tensors(node: Node, returned: Collection[Node], of_call: Node, path: Path = ()) -> bool:
    """Say whether a graph uses nothing but tensors of a part of what a call returned, besides checking it.

    Args:
        node: the part.
        returned: the nodes in what the graph is to return, and those that are asked for.
        of_call: the call.
        path: the path of the part in what the call returned.
    """
    if text_of(path) in of_call.meta.get("parts", ()):
        return True
    reads = [user for user in node.users if user.target in (getattr, operator.getitem) and user.args[0] is node]
    others = [user for user in node.users if user not in reads]
    if node in returned or not all(is_runtime_check(user.target) or user.meta.get("is_guard") for user in others):
        return False
    return all(_gives_tensors(read, returned, of_call, (*path, (read.target, read.args[1]))) for read in reads)
