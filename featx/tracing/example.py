"""ExampleTracer: run `forward` on an example, and record the graph of what it really does.

Tensors stay tensors: every torch call passes through a `TorchFunctionMode`, which runs it on stand-ins without values
and knows a tensor by its identity. Sizes are traced numbers. What Python decides becomes a guard. Where the model asks
for a value, the trace starts again with real tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featx.errors import FeatxError, TraceError
from featx.ir.effects import MeasuredEffects, module_draws, module_writes_state, operator_writes
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.caches import Caches
from featx.tracing.constants import memory_of, tensors_of
from featx.tracing.example_inputs import bind_example
from featx.tracing.frames import user_frame
from featx.tracing.grad_modes import gradients_set
from featx.tracing.left_behind import what_forward_left
from featx.tracing.recording import NeedsValues, Recording, Unfollowable
from featx.tracing.saved_state import SavedState
from featx.tracing.scope import borrowed, walk_modules
from featx.tracing.shapes import output_of
from featx.tracing.state import ModuleState
from featx.tracing.symbolic import Scope, is_leaf_class
from featx.tracing.wrapping import globals_of, wrapped_functions
from featx.tree import tree_leaves

LeafPolicy = Callable[[nn.Module, str], bool]


class ExampleTracer:
    """Traces a module or function on an example.

    Args:
        is_leaf: says, for a module and its path, whether a call of it is one node. By default modules of torch.nn are.
        autowrap_modules: Python modules whose functions are recorded as one node each.
        autowrap_functions: functions that are recorded as one node each.
        opened: the paths of the modules that are traced through; all others are one node each, whatever `is_leaf` says,
            which then only decides how nodes are numbered. By default what `is_leaf` says.
        keep_source: note the line of the model in `node.meta["source"]`.
        keep_output: return what the root returns; otherwise the graph returns None, and the output may be of any kind.
    """

    def __init__(
        self,
        is_leaf: LeafPolicy | None = None,
        autowrap_modules: tuple[ModuleType, ...] = (math,),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        *,
        opened: frozenset[str] | None = None,
        keep_source: bool = False,
        keep_output: bool = True,
    ) -> None:
        self.is_leaf = is_leaf or (lambda module, path: is_leaf_class(type(module)))
        self.opened = opened
        self._autowrap = (tuple(autowrap_modules), tuple(autowrap_functions))
        self._keep_source = keep_source
        self.keep_output = keep_output

    def trace(
        self,
        root: nn.Module | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_enough: Callable[[Graph], bool] | None = None,
    ) -> ExampleTrace:
        """Run `root(*args, **kwargs)` and return what was recorded.

        Nothing is computed, unless the model asks for values; then it runs on the example for real. The model and the
        inputs are as before afterwards, also after an error. Where something fails and `is_enough` says of the graph so
        far that it has all that is wanted, the trace ends there.

        Raises:
            TraceError: what the root module itself does cannot be followed; the message says where and what to do.
        """
        is_without_values = any(
            value.is_meta for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        )
        # Gradients are on whatever the caller has, or a `no_grad` of the model would change nothing and not be seen;
        # but some models run without only.
        gradients = (True,) if torch.is_grad_enabled() else (True, False)
        errors: list[Exception] = []
        for is_real in (False,) if is_without_values else (False, True):
            for enabled in gradients:
                try:
                    return self.run_once(root, args, kwargs, is_enough, is_real=is_real, gradients=enabled)
                except FeatxError:
                    raise
                except NeedsValues as error:
                    if is_real or is_without_values:
                        whose = "its weights have" if is_real else "the example has"
                        raise _error(root, f"the model asks for values, and {whose} none", "") from error
                    break
                except Exception as error:
                    errors.append(error)
        raise errors[-1]

    def run_once(
        self,
        root: nn.Module | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_enough: Callable[[Graph], bool] | None = None,
        *,
        is_real: bool,
        gradients: bool = True,
    ) -> ExampleTrace:
        """Trace on real tensors, or on those without values and no others, with gradients or without; see `trace`.

        Raises:
            NeedsValues: the model asks for a value that its tensors do not have. It is no Exception.
            TraceError: something cannot be followed.
        """
        try:
            trace = ExampleTrace(self, root, (args, kwargs), is_real=is_real, keep_source=self._keep_source)
            trace.gradients = gradients
            trace.run(args, kwargs, *self._autowrap, is_enough)
        except Unfollowable as error:
            raise _error(root, error.what, error.place) from error
        return trace


class ExampleTrace(Recording):
    """One run of a model on an example. `graph` is what it did."""

    def __init__(self, tracer: ExampleTracer, root: Any, example: Any, *, is_real: bool, keep_source: bool) -> None:
        self.root: nn.Module = root if isinstance(root, nn.Module) else nn.Module()
        self._function: Callable[..., Any] = root.forward if isinstance(root, nn.Module) else root
        self.signature = inspect.signature(self._function)
        self.module_paths = {module: path for path, module in walk_modules(self.root)}
        owned: dict[int, str] = {}
        device = None
        for module, prefix in self.module_paths.items():
            for name, tensor in tensors_of(module):
                owned.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
                device = device or tensor.device
        if device is None:
            devices = [value.device for value in tree_leaves(example) if isinstance(value, torch.Tensor)]
            device = devices[0] if devices else torch.device("cpu")
        super().__init__(owned, device, is_real=is_real, keep_source=keep_source)
        self._is_leaf = tracer.is_leaf
        self._opened = tracer.opened
        self._keep_output = tracer.keep_output
        self._hooked = [
            path for module, path in self.module_paths.items() if module._forward_hooks or module._forward_pre_hooks
        ]
        self._states: dict[nn.Module, ModuleState] = {}
        self._training = {module: module.training for module in self.module_paths}
        self._caller = self.scope
        # Whether it runs with gradients switched on.
        self.gradients = True
        self._saved = SavedState()
        # Where a trace for real may write: the tensors of the model by their memory.
        self._owners: dict[int, list[torch.Tensor]] = {}
        for module in self.module_paths if is_real else ():
            for _, tensor in tensors_of(module):
                self._owners.setdefault(memory_of(tensor), []).append(tensor)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        modules: tuple[ModuleType, ...],
        functions: tuple[Callable[..., Any], ...],
        is_enough: Callable[[Graph], bool] | None,
    ) -> None:
        """Run the root on the example and record it. The model is as before afterwards."""
        with ExitStack() as stack:
            # Tensors count their versions outside inference mode only.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(gradients_set(self.gradients))
            if self.is_real:
                stack.enter_context(self._saved)
            stack.enter_context(borrowed(list(self.module_paths), self._on_module))
            kinds = {type(module) for module in self.module_paths if type(module).__module__[:9] != "torch.nn."}
            namespaces = globals_of(self._function, kinds)
            caches = Caches(namespaces, kinds, self._is_of_trace)
            stack.enter_context(caches)
            stack.enter_context(wrapped_functions(namespaces, modules, functions, self._on_draw, self._on_wrapped))
            stack.enter_context(self._attributes_restored())
            call_args, call_kwargs = bind_example(self, self._function, args, kwargs, self._stand_in)
            self._keep_state(self.root)
            if not self.gradients:
                self._on_grad_question()
            stack.enter_context(_Mode(self))
            try:
                result = self._function(*call_args, **call_kwargs)
                stack.enter_context(torch._C.DisableTorchFunction())
                output = self.create_arg(result) if self._keep_output else None
                self._check_state(self.root)
                self._check_memory()
                number = caches.changed_number()
                if number is not None:
                    raise Unfollowable(f"forward changes the number {number} of its Python module or of a class")
            except (Unfollowable, NeedsValues, Exception):
                self.whole = 0
                self.names.assign()
                if is_enough is None or not is_enough(self.graph):
                    raise
                output = None
            stack.enter_context(torch._C.DisableTorchFunction())
            self._autocast_modes.leave()
            self.graph.output(output)
        self.is_active = False
        self.names.assign()
        for node, tensor, version in self.versions:
            node.meta["is_overwritten"] = tensor._version != version or memory_of(tensor) in self.uncounted

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_real or tensor.is_meta:
            return tensor.detach().clone(memory_format=torch.preserve_format)
        return self.stand_ins.of(tensor)

    @contextmanager
    def _attributes_restored(self) -> Generator[None]:
        try:
            yield
        finally:
            for state in self._states.values():
                # For real, what a module that is kept whole assigns is not followed.
                state.restore(self._is_of_trace if not self.is_real else lambda value: True)
            for module, mode in self._training.items():
                if module.training is not mode:
                    module.__dict__["training"] = mode

    def _is_of_trace(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or id(value) in self._paths:
            return False
        return self.lineage.get(value) is not None or value.is_meta

    def _keep_state(self, module: nn.Module) -> None:
        if module not in self._states and type(module).__module__[:17] != "torch.nn.modules.":
            self._states[module] = ModuleState(module)

    # -- modules -----------------------------------------------------------------------------------------------------

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the path of a module in the root, the first one where it has several."""
        path = self.module_paths.get(mod)
        if path is None:
            raise Unfollowable(f"a {type(mod).__name__} that is not registered as a submodule is used")
        return path

    def _on_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.whole:
            self._keep_state(module)
            if self._opened is not None and module in self.module_paths:
                path = self.module_paths[module]
                if self._is_leaf(module, path):
                    self.names.skip_call(path)
            return self._result_of(module, args, kwargs)
        path = self.path_of_module(module)
        outer = self.scope
        self.scope = Scope(path, type(module), outer.stack)
        self._caller = outer
        try:
            is_leaf = self._is_leaf(module, path) if self._opened is None else path not in self._opened
            if is_leaf or isinstance(module, torch.jit.ScriptModule):
                return self._call_whole(module, path, args, kwargs)
            return self._open(module, path, forward, args, kwargs)
        finally:
            self.scope = outer

    def _open(
        self, module: nn.Module, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        last, names, lineage = self.graph.root.prev, self.names.mark(), self.lineage.mark()
        scope, caller, versions, memories = self.scope, self._caller, len(self.versions), len(self.memories)
        self._keep_state(module)
        try:
            result = forward(*args, **kwargs)
            self._check_state(module)
            return result
        except Unfollowable:
            if not self.may_stay_whole(path):
                raise
            # What was recorded inside is taken back, and the module is kept whole.
            self.scope, self._caller, self.whole = scope, caller, 0
            self.names.forget(names)
            self.lineage.forget(lineage)
            del self.versions[versions:], self.memories[memories:]
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            return self._call_whole(module, path, args, kwargs)

    def may_stay_whole(self, path: str) -> bool:
        """Say whether the module at `path` may be kept whole where it cannot be followed."""
        return self._opened is None

    def _call_whole(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = self.scope
        self.scope = self._caller  # which takes out of a value what it passes on
        with torch._C.DisableTorchFunction():
            arguments = tuple([self.create_arg(value) for value in args])
            keywords = {key: self.create_arg(value) for key, value in kwargs.items()} if kwargs else {}
        self.scope = inside
        if module.training is not self._training[module]:
            raise Unfollowable(f"forward switches '{path}' between train and eval mode")
        is_own = type(module).__module__[:17] != "torch.nn.modules." or bool(module._modules)
        if is_own:
            self._keep_state(module)
        call = functools.partial(self._result_of, module, args, kwargs)
        values = args if not kwargs else (args, kwargs)
        return self._as_one_node("call_module", path, arguments, keywords, values, call, is_measured=is_own)

    def _as_one_node(
        self, op: str, target: Any, args: Any, kwargs: Any, values: Any, call: Callable[[], Any], *, is_measured: bool
    ) -> Any:
        with torch._C.DisableTorchFunction():
            leaves = values if len(values) == 1 and type(values[0]) is torch.Tensor else tuple(tree_leaves(values))
            inputs: list[torch.Tensor] = []
            if is_measured:
                inputs = [value for value in leaves if isinstance(value, torch.Tensor) and not value.is_inference()]
            before = [value._version for value in inputs]
        self.drew = self.wrote_model = self.wrote_unseen = False
        self.whole += 1
        try:
            result = call()
        finally:
            self.whole -= 1
        with torch._C.DisableTorchFunction():
            node = self.add_node(op, target, args, kwargs, None, None)
            if self._opened is not None and op == "call_module" and not self._is_leaf(self._module_at(target), target):
                node.meta["is_whole"] = True
            if is_measured:
                pairs = zip(inputs, before, strict=True)
                written = [value for value, version in pairs if value._version != version or self.wrote_unseen]
                node.meta["effects"] = self._effects(node, inputs, written, result)
            if op == "call_module" and self._hooked and self._has_hooks(target):
                # The hooks, which have not run, may give something else.
                self._check_form(node, result, f"what '{target}' returns")
            if op == "call_module":
                self.scope = self._caller  # what is taken out of the result is taken by the caller
            if isinstance(result, torch.Tensor) and any(result is value for value in leaves):
                result = self.another_name(result, user_frame())
            return self.follow(result, node, user_frame())

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
            positions_of(written), positions_of(shared), self.drew, self.wrote_model or self.wrote_unseen
        )

    def _result_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Without its hooks: they are to run when the extractor does, and not before.
        if not self.is_real:
            with torch._C.DisableTorchFunction():
                result = output_of(module, args, kwargs)
            if result is not None:
                if module.training:
                    self.drew = self.drew or module_draws(module)
                    self.wrote_model = self.wrote_model or module_writes_state(module)
                return result
        return module.forward(*args, **kwargs)

    def _check_memory(self) -> None:
        # torch does not tell of Tensor.set_.
        for tensor, memory in self.memories:
            if memory_of(tensor) != memory:
                raise Unfollowable("forward gives a tensor other memory (Tensor.set_)")

    def _check_state(self, module: nn.Module) -> None:
        """Raise where forward left something on an opened module that a graph cannot."""
        if module.training is not self._training[module]:
            raise Unfollowable(f"forward switches '{self.module_paths[module]}' between train and eval mode")
        if self.gave_memory:
            self.gave_memory = False
            raise Unfollowable("forward gives a tensor other memory (Tensor.set_)")
        state = self._states.get(module)
        left = None if state is None else what_forward_left(self, module, state, self._is_of_trace)
        if left is not None:
            raise Unfollowable(left)

    # -- functions that are recorded as one node ---------------------------------------------------------------------

    def _on_wrapped(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, functools._lru_cache_wrapper):
            # Past the cache, which must not keep a tensor of this trace.
            return function.__wrapped__(*args, **kwargs)
        if function is torch.is_grad_enabled:
            return self._on_grad_question()
        if self.whole or not self._is_followed((*tree_leaves(args), *tree_leaves(kwargs))):
            return function(*args, **kwargs)
        if getattr(math, getattr(function, "__name__", ""), None) is function:
            return self._on_math(function, args)
        with torch._C.DisableTorchFunction():
            arguments = tuple([self.create_arg(value) for value in args])
            keywords = {key: self.create_arg(value) for key, value in kwargs.items()}
        call = functools.partial(function, *args, **kwargs)
        return self._as_one_node("call_function", function, arguments, keywords, (args, kwargs), call, is_measured=True)

    def _on_grad_question(self) -> bool:
        answer = torch.is_grad_enabled()
        if not self.whole:
            node = self._create_plain_node("call_function", torch.is_grad_enabled, (), {})
            self._guard(node, answer, "whether gradients are enabled")
        return answer

    def _on_math(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        arguments = tuple([self.create_arg(value) for value in args])
        self.whole += 1
        try:
            result = function(*args)
        finally:
            self.whole -= 1
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            return result
        return self.follow(result, self.add_node("call_function", function, arguments, {}, None, None), None)

    def _on_draw(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise Unfollowable(f"forward draws from a random generator of Python or numpy ({function.__name__})")

    def before_write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save the tensors of the model that are about to be written for real."""
        if self.is_real:
            self._saved.save([*args, *kwargs.values()])

    def execute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call; for real, weights that it writes through a view of them are saved ahead of it."""
        if self.is_real and (operator_writes(function.__name__) or "out" in kwargs):
            with torch._C.DisableTorchFunction():
                for target in tree_leaves((args[:1], kwargs.get("out"))):
                    owners = self._owners.get(memory_of(target), []) if isinstance(target, torch.Tensor) else []
                    self.wrote_model = self.wrote_model or bool(owners)
                    self._saved.save(owners)
        return super().execute(function, args, kwargs)


class _Mode(TorchFunctionMode):
    """Hands every torch call of this thread to the trace."""

    def __init__(self, trace: ExampleTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._trace.on_call(func, args, kwargs or {})


def _error(root: Any, what: str, place: str) -> TraceError:
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "function")
    return TraceError(
        f"cannot trace {name}: {what} {place}. To go on, put the code that does it into a submodule, which is kept "
        "whole, or into a function that featx.wrap marks."
    )
