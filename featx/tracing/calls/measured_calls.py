"""Calls that are one node: run them, and measure what they write, share and draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from featx.ir.arguments import Argument
from featx.ir.effects import MeasuredEffects
from featx.ir.memory import memory_of
from featx.ir.modules import modules_of
from featx.ir.node import Node
from featx.libraries import is_of_models_library
from featx.tracing.calls.given import Given
from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.file_globals.outer_values import OuterValues
from featx.tracing.guards.held import check_held
from featx.tracing.nodes.scope import Scope
from featx.tracing.objects.module_parts import parameters_and_buffers
from featx.tracing.objects.structure import is_structure, leaves_of
from featx.tracing.recording.recorder import Recorder
from featx.tracing.recording.results import Results
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.signals import ModifiedFromOutside
from featx.tracing.source_writes.possible_writes import function_may_write_more, module_may_write_more
from featx.tree import held, holds_no_tensor, tree_leaves, tree_map

# Where a call is given something: the position or the name of an argument. With the nodes for what is held there.
Place = int | str
Held = dict[Place, Node]


class MeasuredCalls:
    """Runs calls of modules and functions, each of which becomes one node of the graph.

    Args:
        recorder: makes the nodes.
        results: follows what the calls return.
        torch_calls: what runs inside of them.
        model_context: what is traced.

    Attributes:
        outer_values: notices what code sets outside of the modules for a call; None where an earlier run has done that.
    """

    def __init__(
        self,
        recorder: Recorder,
        results: Results,
        torch_calls: TorchCalls,
        model_context: ModelContext,
    ) -> None:
        self._recorder = recorder
        self._results = results
        self._torch_calls = torch_calls
        self._hooked = model_context.hooked
        self.context = model_context
        self.outer_values: OuterValues | None = None

    def has_given(self, tensor: torch.Tensor, name: str) -> bool:
        """Say whether a call that is one node has returned the tensor with an attribute of this name."""
        return name in self._results.attributes_given.get(id(tensor), ())

    def has_hooks(self, path: str) -> bool:
        """Say whether the module at `path`, or one inside it, has forward hooks."""
        return any(hooked == path or hooked.startswith(f"{path}.") for hooked in self._hooked)

    def run(
        self,
        node: tuple[str, Any, tuple[Argument, ...], dict[str, Argument]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
        *,
        is_measured: bool,
        module: nn.Module | None = None,
        is_opaque_module: bool = False,
        taken_in: Scope | None = None,
    ) -> tuple[Node, Any]:
        """Run a call and record it as one node; return the node and the result, followed.

        Args:
            node: opcode, target, arguments and keyword arguments.
            args: what the code calls it with.
            kwargs: inputs by name.
            call: runs it.
            is_measured: whether to see what it writes, shares and draws; of torch's own layers that is known.
            module: the module that is called; None for a function.
            is_opaque_module: whether it is a module that is kept whole although the policy would look into it.
            taken_in: the scope that takes things out of the result; by default the present one.
        """
        recorder = self._recorder
        with torch._C.DisableTorchFunction():
            is_one_tensor = len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor
            leaves = args if is_one_tensor else tuple(tree_leaves((args, kwargs)))
            inputs = [value for value in _tensors_in((args, kwargs)) if not value.is_inference()] if is_measured else []
            before = list(map(recorder.stand_ins.version_of, inputs))
            have_values = is_measured and (recorder.is_real or any(map(_may_have_values, leaves)))
        is_plain = not is_measured or all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        given = None if is_plain else Given(args, kwargs)
        with self._torch_calls.kernels.recorded(), nullcontext() if given is None else given.put_back_on_error():
            result = self._result_of(call, is_measured)
            if given is not None:
                given.refuse_numbers()
                given.refuse_same(result)
            with torch._C.DisableTorchFunction():
                held_at = {} if given is None else self._held(node, given.places)
                added = recorder.add_node(*_with_held(node, held_at), None, None)
                if is_opaque_module:
                    added.meta["is_opaque_module"] = True
                if is_measured:
                    pairs = zip(inputs, before, strict=True)
                    is_unseen, version_of = recorder.opaque_call.has_untracked_writes, recorder.stand_ins.version_of
                    written = [value for value, version in pairs if is_unseen or version_of(value) != version]
                    added.meta["effects"] = self._effects(added, module, inputs, written, result)
                if given is not None:
                    self._check_held(held_at, given, str(node[1]))
                self._guard_result(added, result, module, is_measured=is_measured, have_values=have_values)
                recorder.scope = taken_in or recorder.scope
                result = self._alias_returned_inputs(leaves, result)
                # Where a single tensor goes decides nothing.
                frame = None if isinstance(result, torch.Tensor) else recorder.model_frame()
                if is_measured:
                    self._results.follow_attributes(result, added)
                return added, self._results.follow(result, added, frame)

    def _held(self, node: tuple[str, Any, tuple[Argument, ...], dict[str, Argument]], places: list[Place]) -> Held:
        """Return nodes for the arguments at some places of a call, which hold what the call may change."""
        recorder, found = self._recorder, Held()
        for place in places:
            argument = node[2][place] if isinstance(place, int) else node[3][place]
            is_node = isinstance(argument, Node)
            found[place] = argument if is_node else recorder.add_unnamed_node("call_function", held, (argument,), {})
        return found

    def _check_held(self, held_at: Held, given: Given, name: str) -> None:
        """Let the graph check that a call leaves in what it is given what it has left there now."""
        recorder = self._recorder
        for place, node in held_at.items():
            what = f"what the call of '{name}' leaves in a list, a dict or an object that it is given"
            left = given.left_at(place, self._argument_left)
            check = recorder.add_unnamed_node("call_function", check_held, (node, left, what), {})
            check.meta["is_guard"] = True

    def _argument_left(self, value: Any) -> Argument:
        """Return what stands for a value that a call has left somewhere; `...` for a tensor of the call's own."""
        is_new = isinstance(value, torch.Tensor) and not self._recorder.is_of_graph((value,))
        return ... if is_new else self._recorder.create_unnamed_arg(value)

    def _result_of(self, call: Callable[[], Any], is_measured: bool) -> Any:
        opaque_call = self._recorder.opaque_call
        if is_measured:
            with torch._C.DisableTorchFunction():  # the trace would follow the states that are compared
                self._torch_calls.check_generator()
        self.context.check_plain_values()  # those that the code around the call has changed
        changed = self.changed_for_call() if is_measured else None
        if changed is not None:
            raise ModifiedFromOutside(f"forward changes {changed} for a call that is one node,")
        try:
            with opaque_call:
                return call()
        finally:
            self.accept_outer_values(is_measured=is_measured)
            # Whatever the call did to the generator, it will do again.
            if opaque_call.draws or is_measured:
                self._torch_calls.generator.note()
            opaque_call.restore_generators()

    def note_left_attributes(self, call: Node) -> None:
        """Take note that a call of a module has assigned attributes of it, which a later one may read."""
        call.meta["effects"] = replace(call.meta["effects"], leaves_attributes=True)

    def changed_for_call(self) -> str | None:
        """Name what forward has set outside of the modules for a call that may be one node; None if that is nothing."""
        return None if self.outer_values is None else self.outer_values.changed_for_call()

    def accept_outer_values(self, *, is_measured: bool = True) -> None:
        """Take note that a call which is one node may have changed values outside of the modules: it will again."""
        self.context.accept_plain_values()
        if is_measured and self.outer_values is not None:
            self.outer_values.accept()

    def _guard_result(
        self, node: Node, result: Any, module: nn.Module | None, *, is_measured: bool, have_values: bool
    ) -> None:
        # What is in it may depend on values; and hooks, which have not run, may give something else.
        is_hooked = bool(self._hooked) and not is_measured and self.has_hooks(str(node.target))
        if not is_measured and not is_hooked:
            return
        what = f"what '{node.target if isinstance(node.target, str) else node.name}' returns"
        if is_hooked:
            self._recorder.guards.add_for_form(node, result, what)
        else:
            follows_from = self._origin_of_form(str(node.target), module)
            self._recorder.guards.add_for_result(node, result, what, have_values=have_values, follows_from=follows_from)

    def _origin_of_form(self, target: str, module: nn.Module | None) -> str | None:
        """Say from what the form of the result of the last call follows, as for `GuardNodes.add_for_result`.

        A call of which that is known may be left out. Only modules of libraries of models count as known: code of the
        user may keep something in Python that others read, which no trace sees.
        """
        call = self._recorder.opaque_call
        if module is None or call.asks_for_values or call.has_untracked_writes or self.has_hooks(target):
            return None
        if not all(map(is_of_models_library, modules_of(module))):
            return None
        return "sizes" if call.asks_for_sizes else "nothing"

    def _alias_returned_inputs(self, inputs: Any, result: Any) -> Any:
        # For another input or state, the call may not return its own input. So an alias is returned.
        # A tensor of the model has its stand-in: forward may write what it has got.
        recorder, owned = self._recorder, self._recorder.owned
        if isinstance(result, torch.Tensor) and id(result) not in owned and id(result) not in map(id, inputs):
            return result
        given = {id(value) for value in inputs if isinstance(value, torch.Tensor)}
        returned = set(map(id, tree_leaves(result)))
        if returned.isdisjoint(given) and owned.keys().isdisjoint(returned):
            return result
        frame, make_alias = recorder.model_frame(), self._torch_calls.make_alias

        def apart(leaf: Any) -> Any:
            if id(leaf) in owned and not recorder.is_real:
                leaf = recorder.stand_ins.of(leaf)
            elif id(leaf) not in given and id(leaf) not in owned:
                return leaf
            return make_alias(leaf, frame)

        return tree_map(apart, result)

    def apart(self, result: Any, mark: Node) -> Any:
        """Return the result of a call as the value of `mark`: its tensors are objects of their own."""
        frame, make_alias = self._recorder.model_frame(), self._torch_calls.make_alias
        with torch._C.DisableTorchFunction():
            self._recorder.follow_apart(mark)
            aliases = tree_map(lambda leaf: make_alias(leaf, frame) if isinstance(leaf, torch.Tensor) else leaf, result)
            return self._results.follow(aliases, mark, None)

    def _effects(
        self,
        node: Node,
        module: nn.Module | None,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
        result: Any,
    ) -> MeasuredEffects:
        opaque_call = self._recorder.opaque_call
        positions = {source: position for position, source in enumerate(node.all_input_nodes)}
        for source, position in [*positions.items()]:
            if source.target is held:
                positions = {**dict.fromkeys(source.all_input_nodes, position), **positions}
        memory = {memory_of(value) for value in _tensors_in(result)}
        leaves = [value for value, _ in leaves_of(result) if not isinstance(value, torch.Tensor)]
        # An object of an unknown class may hold inputs of the call.
        is_opaque = not all(map(holds_no_tensor, leaves))

        def positions_of(values: list[torch.Tensor]) -> tuple[int, ...]:
            found: set[int] = set()
            for value in values:
                sources = [source for source in self._recorder.sources_of(value) if source in positions]
                found.update([positions[sources[0]]] if sources else [])
            return tuple(sorted(found))

        shared = [value for value in inputs if is_opaque or memory_of(value) in memory]
        return MeasuredEffects(
            writes=positions_of(written),
            shares=positions_of(shared),
            is_random=opaque_call.draws,
            writes_state=opaque_call.writes_model or opaque_call.has_untracked_writes,
            has_conditional_writes=self._may_write_more(node.target if module is None else module),
            returns_state=module is not None and self._returns_state(module, memory),
            writes_elsewhere=not opaque_call.written <= self._memory_kept_by(module, opaque_call.written),
        )

    def _memory_kept_by(self, module: nn.Module | None, memory: set[int]) -> set[int]:
        """Return what of some memory is that of tensors which a module keeps itself."""
        if module is None or not memory:
            return set()
        made_for = self._recorder.stand_ins.made_for
        held = list(parameters_and_buffers(module))
        twins = [] if self._recorder.is_real else [twin for each in held if (twin := made_for(each)) is not None]
        return memory.intersection(map(memory_of, (*held, *twins)))

    def _returns_state(self, module: nn.Module, memory: set[Any]) -> bool:
        """Say whether a module returns memory of what it keeps itself: a buffer, or a part of one."""
        if not memory:
            return False
        held = parameters_and_buffers(module)
        if self._recorder.is_real:
            return any(memory_of(tensor) in memory for tensor in held)
        # A tensor that has no stand-in was not read, so that it is not returned, unless it is as it is.
        are_returned = not memory.isdisjoint(self.context.memories)
        made_for = self._recorder.stand_ins.made_for
        return any(
            (are_returned and memory_of(tensor) in memory)
            or ((twin := made_for(tensor)) is not None and memory_of(twin) in memory)
            for tensor in held
        )

    def _may_write_more(self, called: Any) -> bool:
        if isinstance(called, nn.Module):
            return module_may_write_more(called, self._recorder.opaque_call.ran)
        return function_may_write_more(called)


def _with_held(
    node: tuple[str, Any, tuple[Argument, ...], dict[str, Argument]], held_at: Held
) -> tuple[str, Any, tuple[Argument, ...], dict[str, Argument]]:
    """Return a call with nodes in the place of some of its arguments."""
    op, target, args, kwargs = node
    args = tuple([held_at.get(place, argument) for place, argument in enumerate(args)])
    return op, target, args, {name: held_at.get(name, argument) for name, argument in kwargs.items()}


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf, _ in leaves_of(value) if isinstance(leaf, torch.Tensor))


def _may_have_values(value: Any) -> bool:
    return not value.is_meta if isinstance(value, torch.Tensor) else is_structure(value)
