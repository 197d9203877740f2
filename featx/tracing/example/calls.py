"""Calls: which modules and functions a trace on an example looks into, and which are one node each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from threading import get_ident
from typing import Any, cast

import torch
from torch import nn

from featx.ir.effects import MeasuredEffects
from featx.ir.module_effects import module_draws, module_writes_state
from featx.ir.node import Node
from featx.tracing.checks.left_behind import assigned_to_others, what_forward_left
from featx.tracing.environment.generators import SharedGenerators, TorchGenerator
from featx.tracing.example.lineage import Part
from featx.tracing.example.module_output import mark_output
from featx.tracing.example.recording import NeedsValues, Recording
from featx.tracing.example.surroundings import ModelTensors, Surroundings
from featx.tracing.guards.scalars import TracedFloat, TracedInt, plain_numbers
from featx.tracing.replica.hooks import tensors_kept_by_hooks
from featx.tracing.replica.mode_reads import mode_of
from featx.tracing.replica.module_states import ModuleStates
from featx.tracing.replica.modules import has_hooks, has_own_call, modules_of, only_passes_on
from featx.tracing.replica.replica import Replica
from featx.tracing.signals import ChangedByOthers, LeftBehind, Unfollowable, Unholdable
from featx.tracing.stand_ins.kernels import Kernels
from featx.tracing.stand_ins.module_shapes import output_of
from featx.tracing.symbolic.constants import memory_of
from featx.tracing.symbolic.tracer import Scope
from featx.tree import tree_leaves, tree_map

LeafPolicy = Callable[[nn.Module, str], bool]
_STORED_BY_HOOK = (
    "forward reads what a forward hook stores, and hooks of modules that are kept whole do not run during a trace,"
)


class Calls(Recording):
    """What one trace does with the calls of modules and of wrapped functions.

    Args:
        surroundings: what is traced.
        replica: the copy of it that runs, and its tensors.
        is_leaf: says, for a module and its path, whether a call of it is one node.
        opened: the paths of the modules that are traced through, where that is known; `is_leaf` numbers nodes then.
        asked_for: the paths of modules whose outputs are marked.
        is_real: whether tensors have values.
        keep_source: note the line of the model in each node.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        replica: tuple[Replica, ModelTensors],
        is_leaf: LeafPolicy,
        opened: frozenset[str] | None,
        asked_for: frozenset[str],
        *,
        is_real: bool,
        keep_source: bool,
    ) -> None:
        self.replica, self.tensors = replica
        super().__init__(self.tensors.paths, surroundings.device, is_real=is_real, keep_source=keep_source)
        self.root = self.replica.root
        self.module_paths = self.replica.paths
        self._is_leaf = is_leaf
        self._opened = opened
        self._asked_for = asked_for
        # Whether calls inside of modules that are kept whole count in the names of later calls of the same modules.
        self._counts_inside = opened is not None
        self._hooked = surroundings.hooked
        self.states = ModuleStates(self.module_paths)
        self._assigned = surroundings.assigned_to_others
        self._missed_writes = surroundings.missed_writes
        # The modules that were traced through, without an end in the middle.
        self._looked_into: set[nn.Module] = {self.root}
        self._called_whole: set[str] = set()
        # Modules that were to be opened, or whose output was asked for, and that ran inside one that is kept whole.
        self.ran_inside_whole: set[str] = set()
        self._training = {module: mode_of(module) for module in self.module_paths}
        self._caller = self.scope
        # The checks that gradients are enabled, or not, as they were when forward asked.
        self.gradient_checks: list[Node] = []
        # The module in which the trace broke off.
        self.broken_off = ""
        self.kernels = Kernels(self.on_unseen_kernel, self.on_write if is_real else None, self.note_dynamic_shape)
        self.generator = TorchGenerator()
        self._thread = get_ident()
        # What a call that is one node has drawn from, and is to be put back.
        self._generators: SharedGenerators | None = None

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the model itself, where a trace for real has a copy of it."""
        return self.replica.original_of(tensor)

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the path of a module in the root, the first one where it has several."""
        path = self.module_paths.get(mod)
        if path is None:
            raise Unfollowable(f"a {type(mod).__name__} that is not registered as a submodule is used")
        return path

    def check_constant(self, tensor: torch.Tensor) -> None:
        """Raise where a forward hook may have stored a tensor in an earlier call."""
        if self._hooked and id(tensor) in self._kept_by_hooks:
            raise Unfollowable(_STORED_BY_HOOK)

    def check_missing(self, error: BaseException) -> None:
        """Raise where an error of forward may come from a forward hook that did not run."""
        if isinstance(error, (LookupError, AttributeError)) and any(map(self._has_hooks, self._called_whole)):
            raise Unfollowable(f"{_STORED_BY_HOOK} or something else is missing ({error!r}),") from error

    @functools.cached_property
    def _kept_by_hooks(self) -> set[int]:
        return tensors_kept_by_hooks(map(self._module_at, self._hooked))

    def is_of_trace(self, value: Any) -> bool:
        """Say whether a value is a tensor that this trace has made."""
        if self.replay is not None and self.replay.has_made(value):
            return True
        if not isinstance(value, torch.Tensor) or id(value) in self._paths:
            return False
        return self.lineage.get(value) is not None or value.is_meta

    def on_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of a module: one node, or whatever its forward does."""
        if self.replay is not None:
            return self.replay.on_module(self.module_paths.get(module), forward, args, kwargs)
        if get_ident() != self._thread:
            if self.whole:
                self.wrote_unseen = True  # perhaps: kernels of other threads are not heard
            else:
                self.refuse_other_threads()
            return forward(*args, **kwargs)
        if self.whole:
            self._note_call_inside(module)
            return self._result_of(module, args, kwargs)
        self.check_unseen()
        frame = self.model_frame()
        if frame is not None:
            self.codes.add(frame.f_code)
        path = self.path_of_module(module)
        outer = self.scope
        self.scope = Scope(path, type(module), outer.stack)
        self._caller = outer
        try:
            is_leaf = self._is_leaf_module(module, path) if self._opened is None else path not in self._opened
            if has_own_call(type(module)):
                is_leaf = False  # what it does ahead of forward is recorded by now, and must not run twice
            if is_leaf or isinstance(module, torch.jit.ScriptModule):
                try:
                    return self._call_whole(module, path, args, kwargs)
                except (Unholdable, ChangedByOthers):  # a cache that forward has made, `block.height = height`
                    if self._opened is None or self._is_leaf_module(module, path):
                        raise
            return self._open(module, path, forward, args, kwargs)
        except BaseException:
            self.broken_off = self.broken_off or path
            raise
        finally:
            self.scope = outer

    def refuse_other_threads(self) -> None:
        """Note that forward has another thread compute something. It is raised later, in this thread."""
        what = "forward hands work to another thread or process, which a trace does not see,"
        self.unseen = self.unseen or Unfollowable(what)

    def _note_call_inside(self, module: nn.Module) -> None:
        path = self.module_paths.get(module)
        if path is None:
            return
        if path in self._asked_for or (self._opened is not None and path in self._opened):
            self.ran_inside_whole.add(path)
        if self._counts_inside and self._is_leaf_module(module, path):
            self.names.skip_call(path)

    def _is_leaf_module(self, module: nn.Module, path: str) -> bool:
        # A policy may know the modules of the model by identity.
        return self._is_leaf(self.replica.originals.get(module, module), path)

    def _open(
        self, module: nn.Module, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        last, names, lineage = self.graph.root.prev, self.names.mark(), self.lineage.mark()
        scope, caller, versions, memories = self.scope, self._caller, len(self.versions), len(self.memories)
        kind = type(module)
        may_stay_whole = self.may_stay_whole(path) and (not has_own_call(kind) or only_passes_on(kind))
        mark, autocast = self.states.mark(), self._autocast_modes.mark()
        events = [] if self.call_record is None else self.call_record.events
        number = len(events)
        try:
            self._take_parts((args, kwargs), caller)
            if _packs_padded_batches(module, args, kwargs):
                raise Unfollowable(
                    f"'{path}' packs a padded batch into a nested tensor where gradients are off (use_nested_tensor), "
                    "which no trace sees,"
                )
            result = forward(*args, **kwargs)
            if not isinstance(result, (tuple, list, dict)):
                self._take_parts(result, scope)
            self.check_state(module)
            self._looked_into.add(module)
            if path in self._asked_for:
                mark_output(self.graph, self.create_arg_aside(result), path)
            return result
        except Unfollowable as error:
            if not may_stay_whole:
                raise
            # What was recorded inside is taken back, and the module is kept whole.
            self.scope, self._caller, self.whole, self.unseen, self.broken_off = scope, caller, 0, None, ""
            self.names.forget(names)
            self.lineage.forget(lineage)
            del self.versions[versions:], self.memories[memories:], events[number:]
            self.states.reset(module, mark)
            self._autocast_modes.forget(autocast)
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            counts_inside, self._counts_inside = self._counts_inside, True
            try:
                result = self._call_whole(module, path, args, kwargs)
            finally:
                self._counts_inside = counts_inside
            call = next(node for node in reversed(self.graph.nodes) if node.target == path)
            call.meta["whole_because"] = error.what
            return result

    def _take_parts(self, values: Any, scope: Scope) -> None:
        """Make nodes, in `scope`, of the parts among `values`, which pass into a module or out of it.

        They are named by the module that has taken them, whether the other one is traced through or not.
        """
        for value in tree_leaves(values):
            is_number = isinstance(value, (TracedInt, TracedFloat))
            origin = value.origin if is_number and value.trace is self else self.lineage.get(value)
            if not isinstance(origin, Part) or (origin.node is not None and not origin.node.is_erased):
                continue
            inside, self.scope = self.scope, scope
            try:
                self.node_of(origin)
            finally:
                self.scope = inside

    def may_stay_whole(self, path: str) -> bool:
        """Say whether the module at `path` may be kept whole where it cannot be followed."""
        return self._opened is None

    def _call_whole(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = self.scope
        self.scope = self._caller  # which takes out of a value what it passes on
        try:
            with torch._C.DisableTorchFunction():
                arguments = tuple([self.create_arg(value) for value in args])
                keywords = {key: self.create_arg(value) for key, value in kwargs.items()} if kwargs else {}
        finally:
            self.scope = inside
        if mode_of(module) is not self._training[module]:
            raise Unfollowable(f"forward switches '{path}' between train and eval mode")
        for inner in modules_of(module):
            if has_hooks(inner) and not self._has_hooks(path):
                raise Unfollowable(
                    f"forward registers a hook on '{path}' or inside it, which would not run in a trace,"
                )
            for value in inner._parameters.values():
                if value is not None and id(value) not in self._paths and id(value) not in self.earlier_constants:
                    raise Unfollowable(f"'{path}' runs with other parameters than its own")
        # What torch's own leaves do is known.
        is_own = type(module).__module__[:17] != "torch.nn.modules." or bool(module._modules)
        if is_own:
            self._check_untouched(module, path)
        shown = (args, kwargs) if self.expected_numbers is None else plain_numbers((args, kwargs))
        call = functools.partial(self._result_of, module, *shown)
        values = args if not kwargs else (args, kwargs)
        with self.kernels.seen():
            kinds = {"is_measured": is_own, "is_whole": not self._is_leaf_module(module, path)}
            result = self._as_one_node("call_module", path, arguments, keywords, values, call, **kinds)
        self._called_whole.add(path)
        if is_own:
            self.states.note_call(module)
        if self.call_record is not None:
            self.call_record.note(path, args, kwargs, result)
        return result

    def _check_untouched(self, module: nn.Module, path: str) -> None:
        name = self.states.changed_by_others(module)
        if name is not None:
            raise ChangedByOthers(f"forward changes the attribute '{name}' of or inside '{path}', which is kept whole,")

    def _as_one_node(
        self, op: str, target: Any, args: Any, kwargs: Any, values: Any, call: Callable[[], Any], *,
        is_measured: bool, is_whole: bool = False,
    ) -> Any:  # fmt: skip
        with torch._C.DisableTorchFunction():
            leaves = values if len(values) == 1 and type(values[0]) is torch.Tensor else tuple(tree_leaves(values))
            inputs: list[torch.Tensor] = []
            if is_measured:
                inputs = [value for value in leaves if isinstance(value, torch.Tensor) and not value.is_inference()]
            before = [value._version for value in inputs]
        self.drew = self.wrote_model = self.wrote_unseen = False
        self.ran, self.written_at = set(), set()
        self.whole += 1
        try:
            result = call()
        finally:
            self.whole -= 1
            # Whatever the call did to the generator, it will do again.
            if self.drew:
                self.note_draw()
            elif is_measured:
                self.generator.note()
            if self._generators is not None:
                self._generators.restore()
                self._generators = None
        with torch._C.DisableTorchFunction():
            node = self.add_node(op, target, args, kwargs, None, None)
            if is_whole:
                node.meta["is_whole"] = True
            if is_measured:
                pairs = zip(inputs, before, strict=True)
                written = [value for value, version in pairs if value._version != version or self.wrote_unseen]
                node.meta["effects"] = self._effects(node, inputs, written, result)
            is_nested = is_measured and op == "call_module" and not isinstance(result, torch.Tensor)
            if is_nested or (op == "call_module" and self._hooked and self._has_hooks(target)):
                # What is in it may depend on values; and hooks, which have not run, may give something else.
                self._check_form(node, result, f"what '{target}' returns")
            if op == "call_module":
                self.scope = self._caller  # what is taken out of the result is taken by the caller
            result = self._apart_from(leaves, result)
            # Where a single tensor goes decides nothing.
            return self.follow(result, node, None if isinstance(result, torch.Tensor) else self.model_frame())

    def _apart_from(self, inputs: Any, result: Any) -> Any:
        # For another input, or in another state, the call may return something else than what it got.
        given = {id(value) for value in inputs if isinstance(value, torch.Tensor)}
        if given.isdisjoint(map(id, tree_leaves(result))):
            return result
        frame = self.model_frame()
        return tree_map(lambda leaf: self.another_name(leaf, frame) if id(leaf) in given else leaf, result)

    def _has_hooks(self, path: str) -> bool:
        return any(hooked == path or hooked.startswith(f"{path}.") for hooked in self._hooked)

    def _module_at(self, path: str) -> nn.Module:
        return self.root.get_submodule(path)

    def _effects(
        self, node: Node, inputs: list[torch.Tensor], written: list[torch.Tensor], result: Any
    ) -> MeasuredEffects:
        positions = {source: position for position, source in enumerate(node.all_input_nodes)}
        memory = {memory_of(value) for value in tree_leaves(result) if isinstance(value, torch.Tensor)}

        def positions_of(values: list[torch.Tensor]) -> tuple[int, ...]:
            nodes = [self.create_arg(value) for value in values]
            return tuple([positions[source] for source in nodes if isinstance(source, Node) and source in positions])

        shared = [value for value in inputs if memory_of(value) in memory]
        return MeasuredEffects(
            writes=positions_of(written),
            shares=positions_of(shared),
            is_random=self.drew,
            writes_state=self.wrote_model or self.wrote_unseen,
            may_write_more=self._may_write_more(node.target),
        )

    def _may_write_more(self, called: Any) -> bool:
        if isinstance(called, str):
            return self._missed_writes.by_module(self._module_at(called), self.ran, self.written_at)
        return self._missed_writes.by_function(called, self.written_at)

    def _result_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Without its hooks: they are to run when the extractor does, and not before.
        self.ran.add(module)
        if not self.is_real:
            with torch._C.DisableTorchFunction():
                result = output_of(module, args, kwargs)
            if self._has_own_tensors(module):
                raise NeedsValues
            if result is not None:
                if mode_of(module):
                    self.drew = self.drew or module_draws(module)
                    self.wrote_model = self.wrote_model or module_writes_state(module)
                return result
        return module.forward(*args, **kwargs)

    def on_unseen_kernel(self, function: Any, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Note a kernel that runs outside every call that the trace knows of, where that matters.

        It is raised later: code in C++ on the way would make another error of it. `torch.Tensor(x)`, which torch does
        not tell of either, calls one kernel and returns what that gives; this is recorded.
        """
        if self.whole or self.unseen is not None:
            return None
        if function is torch.ops.aten.alias.default and self._is_of_graph((tensors[0],)):
            with self.kernels.seen():
                result = function(tensors[0])
                node = self.add_node("call_function", function, (self.create_arg(tensors[0]),), {}, "Tensor", None)
                return self.follow(result, node, None)
        is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        if is_random or any(self._is_of_graph((tensor,)) or self._is_unseen(tensor) for tensor in tensors):
            self.unseen = Unfollowable(f"{function} runs in compiled or scripted code, which torch does not tell of,")
        return None

    def on_write(self, function: Any, tensors: list[torch.Tensor]) -> None:
        """Take note that a kernel of a trace for real is about to write tensors."""
        raise NotImplementedError

    def _has_own_tensors(self, module: nn.Module) -> bool:
        # Scripted code runs on tensors that no stand-in takes the place of, and may write them.
        is_scripted = isinstance(module, torch.jit.ScriptModule) and self._device.type != "meta"
        return is_scripted and next(chain(module.parameters(), module.buffers()), None) is not None

    def check_memory(self) -> None:
        """Raise where forward gave a tensor other memory."""
        # torch does not tell of Tensor.set_.
        for tensor, memory in self.memories:
            if memory_of(tensor) != memory:
                raise LeftBehind("forward gives a tensor other memory (Tensor.set_)")

    def check_state(self, module: nn.Module) -> None:
        """Raise where forward left something on an opened module that a graph cannot."""
        if mode_of(module) is not self._training[module]:
            raise LeftBehind(f"forward switches '{self.module_paths[module]}' between train and eval mode")
        self.check_unseen()
        if self.gave_memory:
            self.gave_memory = False
            raise LeftBehind("forward gives a tensor other memory (Tensor.set_)")
        self._check_assignments(module)
        state = self.states.initial(module)
        left = (
            None
            if state is None
            else what_forward_left(self, module, self.module_paths[module], state, self.is_of_trace)
        )
        if left is not None:
            raise LeftBehind(left)

    def _check_assignments(self, module: nn.Module) -> None:
        kind = type(module)
        names = self._assigned.get(kind)
        if names is None:
            names = self._assigned[kind] = frozenset(assigned_to_others(kind))
        for name in names:
            for inner in modules_of(module):
                if inner is module or inner in self._looked_into or name not in inner.__dict__:
                    continue
                # What another value would change at a call of a module of the model's own is seen there.
                if self.states.initial(inner) is None or self.states.is_changed_by_its_calls(inner, name):
                    raise LeftBehind(f"forward may assign '{name}' to a {type(inner).__name__} that is kept whole")

    def check_states(self) -> None:
        """Raise where a module is not what its own calls, or a graph of them, leave it."""
        # Those that ran inside a module that was called whole; parents come first. Not so a module of which only
        # methods were called: they are code of whoever called them.
        ran_whole: set[str] = set()
        for module, path in self.module_paths.items():
            if path in self._called_whole or path.rpartition(".")[0] in ran_whole:
                ran_whole.add(path)
            if module in self._looked_into or path not in ran_whole:
                self.check_state(module)
            elif self.states.initial(module) is not None and self._looked_into.isdisjoint(module._modules.values()):
                self._check_untouched(module, path)


def _packs_padded_batches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if type(module).forward is not nn.TransformerEncoder.forward or cast(Any, module.layers)[0].training:
        return False
    mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    return mask is not None and bool(getattr(module, "use_nested_tensor", False))
