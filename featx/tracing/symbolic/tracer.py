"""Tracer: run `forward` on proxies, without an example, and record the graph of what it does."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import nn

from featx.errors import FeatxError, ModulePathError, TraceError
from featx.ir.arguments import Argument
from featx.ir.graph import Graph
from featx.ir.module_effects import module_draws
from featx.ir.modules import walk_modules
from featx.ir.node import Node, Target
from featx.ir.operator_facts import draws_now, facts_of, facts_of_call, name_of
from featx.tracing.environment.autocast_state import autocast_nesting
from featx.tracing.environment.generators import SETS_GENERATOR, TorchGenerator
from featx.tracing.environment.recursion import nesting_depth_of, raised_recursion_limit
from featx.tracing.environment.restorers import run_restorers
from featx.tracing.environment.thread_modes import FunctionMode, ThreadModes
from featx.tracing.file_globals.caches import Caches
from featx.tracing.file_globals.pass_through import PassThroughs
from featx.tracing.file_globals.wrapping import find_names_to_replace, globals_of
from featx.tracing.model_state.module_state import ModuleState
from featx.tracing.nodes.leaf_classes import checks_inputs, is_leaf_class
from featx.tracing.nodes.naming import QualifiedNames
from featx.tracing.nodes.proxy import ParameterProxy, Proxy, failure, find_proxy, refusal
from featx.tracing.nodes.scope import Scope, name_of_traced
from featx.tracing.nodes.tracer_base import TracerBase
from featx.tracing.objects.module_parts import definitions_in
from featx.tracing.replica.interception import has_backward_hooks, intercept
from featx.tracing.replica.mode_reads import ModeReads, has_set_mode, mode_of, record_mode_reads
from featx.tracing.replica.model_context import refuse_ambiguous
from featx.tracing.replica.replica import Replica, replica_of
from featx.tracing.signals import ThreadInterference, Untraceable, error_that_refuses
from featx.tracing.source.frames import describe, user_frame
from featx.tracing.symbolic.constants import RealTensors
from featx.tracing.symbolic.inputs import bind_inputs, signature_of
from featx.tracing.symbolic.proxyable import ProxyableClassMeta


class CallComparison(Protocol):
    """Compares two calls of forward on one replica."""

    def check(self, graph: Graph, call_again: Callable[[], Graph]) -> None:
        """Raise where a second call does something else than the first one, which has recorded `graph`."""


class Tracer(TracerBase):
    """Traces modules and functions symbolically.

    Modules of torch.nn (except Sequential) are leaves: one `call_module` node each; every other module is traced
    through. Subclass it and override `is_leaf_module`, `call_module`, `create_arg`, `create_proxy`, `to_bool`,
    `iter`, `keys`, `path_of_module` or `getattr` to change that. A tracer serves one trace at a time.

    Args:
        autowrap_modules: Python modules whose functions are recorded as one node each.
        autowrap_functions: functions that are recorded as one node each.
        param_shapes_constant: whether the shape of a parameter is a plain value in the model's code.
    """

    # Trace an input whose default is None, a bool or a string with that default, and check at run time that it has it.
    # torch.fx makes a proxy of it, with which `if mask is None` goes the wrong way; extractors must not.
    specialize_options: bool = False
    # Trace the model as it is in train mode, or in eval mode; None traces it in the modes in which it is.
    training: bool | None = None
    # Observes whether code of the model asks in which mode a module is.
    reads: ModeReads | None = None
    # Makes what compares a second call of forward with the first one. torch.fx compares nothing; extractors must not
    # repeat what only holds for one call.
    new_comparison: Callable[[Tracer, Replica, Caches], CallComparison] | None = None

    def __init__(
        self,
        autowrap_modules: tuple[ModuleType, ...] = (math,),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        param_shapes_constant: bool = False,
    ) -> None:
        self._autowrap_modules = tuple(autowrap_modules)
        self._autowrap_functions = tuple(autowrap_functions)
        self.param_shapes_constant = param_shapes_constant
        self._leaf_kinds: dict[type[nn.Module], bool] = {}
        self.root: nn.Module = nn.Module()
        self.root_module_name = ""
        self.submodule_paths: dict[nn.Module, str] = {}
        self.scope = Scope("", None)
        # By the name of a node: path and type of the module that ran.
        self.node_name_to_scope: dict[str, tuple[str, type | None]] = {}
        self._tensors = RealTensors(self, self.root)
        self._parameter_proxies: dict[str, Any] = {}
        self._names = QualifiedNames()
        self._replica: Replica | None = None
        # By the modules of the model: those of the replica.
        self._twins: dict[nn.Module, nn.Module] = {}
        self._states: dict[nn.Module, ModuleState] = {}
        self._training: dict[nn.Module, bool] = {}
        self._modes = _modes()
        self._generator: TorchGenerator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracer:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            # Python modules cannot be copied.
            twin.__dict__[name] = value if name == "_autowrap_modules" else copy.deepcopy(value, memo)
        return twin

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> Graph:
        """Return the graph of `root`, a module or a function.

        Each node's meta has `nn_module_stack` and, where the model asked for the value, `qualified_name` (see
        `QualifiedNames`). What runs is a replica: the model is only read, and other threads may use it meanwhile.
        O(nodes + modules + parameters).

        Args:
            root: what to trace.
            concrete_args: values of inputs that are fixed, by name.

        Raises:
            TraceError: the code asks a traced value for something that only a real one has; the message says where.
        """
        is_module = isinstance(root, nn.Module)
        if not is_module and not callable(root):
            raise TraceError(f"cannot trace a {type(root).__name__}; give an nn.Module or a function")
        self.root = root if is_module else nn.Module()
        self.root_module_name = name_of_traced(root)
        modules = [module for _, module in walk_modules(self.root)]
        kinds = set(map(type, modules))
        namespaces = globals_of(getattr(root, self.traced_func_name) if is_module else root, kinds)
        caches = Caches(namespaces, kinds, definitions_in(modules))
        self._replica = replica = replica_of(self.root, self.training, caches=caches)
        refuse_ambiguous(replica.paths)
        function = getattr(replica.root, self.traced_func_name) if is_module else root
        self._twins = {module: twin for twin, module in replica.originals.items()}
        # By the modules of the model and by those of the replica, which forward passes on.
        paths = {module: replica.paths.get(twin, "") for module, twin in self._twins.items()}
        self.submodule_paths = {**paths, **replica.paths}
        self._training = {module: mode_of(module) for module in replica.paths}
        watched = ("_parameters", "_buffers") if self.proxy_buffer_attributes else ("_parameters",)
        if self.reads is not None:
            record_mode_reads(replica.paths, self.reads)
        intercept(replica.paths, self._on_call, self._on_read, watched=watched)
        places = find_names_to_replace(namespaces, self._autowrap_modules, self._autowrap_functions, is_recording=False)
        comparison = None if self.new_comparison is None else self.new_comparison(self, replica, caches)

        variables = copy_context()  # what the calls set of context variables goes with this

        def call() -> Graph:
            caches.keep_iterators()
            return variables.run(self._call, replica, function, concrete_args, PassThroughs(places))

        try:
            graph = call()
            if self.reads is not None and any(map(has_set_mode, replica.paths)):
                self.reads.on_unknown()
            if comparison is not None:
                places_of_nodes = self.node_name_to_scope
                comparison.check(graph, call)
                self.graph, self.node_name_to_scope = graph, places_of_nodes
        finally:
            variables.run(caches.restore, self._tensors.was_made)
        self.submodule_paths, self._twins, self._replica = paths, {}, None
        return graph

    def _call(self, replica: Replica, function: Callable[..., Any], concrete_args: Any, passing: PassThroughs) -> Graph:
        """Run forward of the replica once, and return the graph of what it does."""
        self.graph = Graph(tracer_cls=type(self))
        self.scope = Scope("", None)
        self.node_name_to_scope = {}
        self._parameter_proxies = {}
        self._tensors = RealTensors(self, replica.root, self.root)
        self._names = QualifiedNames()
        self._states = {}
        self.refused = None
        self._modes = _modes()
        self._record(function, concrete_args, passing)
        self._tensors.finish(self.graph)
        self._names.assign()
        return self.graph

    def _record(self, function: Callable[..., Any], concrete_args: Any, passing: PassThroughs) -> None:
        modes, generator = ThreadModes(), TorchGenerator()
        restorers: list[Callable[[], object]] = [generator.restore, passing.uninstall, modes.leave]
        try:
            try:
                generator.note()
                self._generator = generator
                passing.install(self._refuse_draw)
                # Gradients are on, or a `no_grad` of the model would change nothing, and not be seen.
                modes.enter(_SymbolicMode(self._on_torch_call), None, gradients=True)
                with raised_recursion_limit(nesting_depth_of(self.submodule_paths.values())):
                    self._run(function, concrete_args)
                self._check_generator()
            finally:
                run_restorers(restorers)
        finally:
            run_restorers(restorers)  # again: an interrupt may have ended the first one
            self._generator = None

    def _run(self, function: Callable[..., Any], concrete_args: Any) -> None:
        self._keep_state(self._twins[self.root])
        signature = signature_of(function)
        target, args, kwargs = bind_inputs(self, function, signature, concrete_args)
        annotation = signature.return_annotation
        try:
            result = self.create_arg(target(*args, **kwargs))
        except Untraceable as signal:
            advice = signal.advice or "make the module that does it a leaf (leaf_modules)"
            raise error_that_refuses(self.root_module_name, signal.what, signal.place, advice) from signal
        except Exception as error:
            if self.refused is None and not isinstance(error, FeatxError) and "Proxy" in str(error):
                # What is written in C, of torch or others, complains of a proxy in its own words.
                raise failure(self, error) from error
            if self.refused is None or error is self.refused:
                raise
            raise self.refused from error  # Python, or the model, made another error of it
        if self.refused is not None:
            raise self.refused
        returns = None if annotation is inspect.Signature.empty else annotation
        self.create_node("output", "output", (result,), {}, type_expr=returns)
        for state in self._states.values():
            for generator in state.drawn_generators():
                raise TraceError(
                    f"cannot trace {self.root_module_name}: forward draws from its {type(generator).__name__}, and a "
                    "graph would repeat that one draw. Draw with torch, or switch that off (eval mode, or a rate of 0)."
                )
        for module in self._states:
            self._check_attributes(module)
            self._check_buffers(module)
        for module in self._training:
            self._check_mode(module)

    def _note_draw(self) -> None:
        """Note that what is recorded now will draw, so that what puts torch's generator back after it is seen."""
        self._check_generator()
        if self._generator is not None:
            self._generator.note()

    def _check_generator(self) -> None:
        try:
            was_set = self._generator is not None and self._generator.was_set()
        except ThreadInterference:  # another thread has seeded it, and may do so in each further trace
            was_set = False
        if was_set:
            raise TraceError(
                f"cannot trace {self.root_module_name}: {SETS_GENERATOR} and a graph would not. Seed before the call "
                "of the model"
            )

    def _check_mode(self, module: nn.Module) -> None:
        if mode_of(module) != self._training[module]:
            raise TraceError(
                f"cannot trace {self.root_module_name}: forward puts '{self.submodule_paths[module]}' into "
                f"{'train' if module.training else 'eval'} mode, and a graph does not switch modes; make the module "
                "that does it a leaf, or switch the mode around the call of the model"
            )

    def _check_attributes(self, module: nn.Module) -> None:
        path = self.submodule_paths[module] or self.root_module_name
        for name, _ in self._states[module].changed_values():
            raise TraceError(
                f"cannot trace {self.root_module_name}: forward changes the attribute '{name}' of {path}, and a graph "
                "would repeat what forward did with its present value; make that module a leaf (leaf_modules), or keep "
                "the value in a buffer"
            )

    def _check_buffers(self, module: nn.Module) -> None:
        path = self.submodule_paths[module]
        for name, value in self._states[module].rebound_buffers(self._is_of_trace).items():
            if type(value) is Proxy and facts_of_call(value.node).writes_first:
                continue  # `self.count += 1` writes in place and then assigns what it wrote
            where = f"{path}.{name}" if path else name
            raise TraceError(
                f"cannot trace {self.root_module_name}: forward assigns a new tensor to the buffer '{where}', and a "
                f"graph cannot. Write into it instead: self.{name}.copy_(value)."
            )

    def _refuse_draw(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = f"{function.__module__ or 'random'}.{function.__name__}"
        what = f"forward draws from Python's or numpy's random generator ({name}), and a graph would repeat it,"
        raise refusal(self, TraceError, what, "draw with torch, or switch that off (eval mode, or a rate of 0)")

    def _is_of_trace(self, value: Any) -> bool:
        return issubclass(type(value), Proxy) or self._tensors.was_made(value)

    def _keep_state(self, module: nn.Module) -> None:
        if module not in self._states:
            self._states[module] = ModuleState(module)

    @property
    def module_stack(self) -> dict[str, tuple[str, type]]:
        """The modules that run now, from the outermost one: their types, by path."""
        return self.scope.stack

    # -- what subclasses override ------------------------------------------------------------------------------------

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether a call of `m` is one node: by default those of torch.nn, except Sequential, and scripted ones."""
        kind = type(m)
        known = self._leaf_kinds.get(kind)
        if known is None:
            known = self._leaf_kinds[kind] = is_leaf_class(kind)
        return known

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the dotted path of `mod`, a module of the root or its copy; the first one where it has several. O(1).

        Raises:
            ModulePathError: the root does not contain it.
        """
        try:
            return self.submodule_paths[mod]
        except KeyError:
            raise ModulePathError(
                f"a {type(mod).__name__} that is not registered runs in {self.where()}: this module is not installed "
                "as a submodule; assign it as an attribute of the model, or keep it in an nn.ModuleList"
            ) from None

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of module `m`: one node if it is a leaf, else what `forward(*args, **kwargs)` records.

        `m` is the module of the model; `forward` belongs to its copy in the replica, which is what runs.
        """
        path = self.path_of_module(m)
        outer = self.scope
        self.scope = Scope(path, type(m), outer.stack)
        try:
            twin = self._twins.get(m, m)
            if self.is_leaf_module(m, path) or checks_inputs(m):
                if mode_of(twin) is not self._training[twin]:
                    self._check_mode(twin)
                if any(isinstance(part, torch.jit.ScriptModule) or module_draws(part) for part in twin.modules()):
                    self._note_draw()
                return self.create_proxy("call_module", path, args, kwargs)
            if self.refuses_questions and has_backward_hooks(m):
                raise TraceError(
                    f"cannot trace {self.root_module_name}: '{path}' has backward hooks, and something in it is "
                    "asked for, which would leave them out; make it a leaf (leaf_modules), or remove them"
                )
            if type(m).forward is not nn.Sequential.forward:  # which changes nothing on the module
                self._keep_state(twin)
            return forward(*args, **kwargs)
        finally:
            self.scope = outer

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Answer the read of a parameter (or buffer, with `proxy_buffer_attributes`) by the model: a proxy of it.

        `parameter_proxy_cache` maps paths to the proxies made so far: one `get_attr` node serves all reads.
        """
        path = self._tensors.path_of(attr_val)
        if path is None:
            return attr_val
        proxy = parameter_proxy_cache.get(path)
        if proxy is None:
            factory = None
            if self.param_shapes_constant and isinstance(attr_val, nn.Parameter):
                factory = partial(ParameterProxy, self, name=path, param=attr_val)
            proxy = self.create_proxy("get_attr", path, (), {}, proxy_factory_fn=factory)
            parameter_proxy_cache[path] = proxy
        return proxy

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Add a node to the graph and note in its meta which module made it."""
        if _modes() != self._modes:
            what = "forward enters torch.autocast or torch.inference_mode, which a graph cannot,"
            raise refusal(self, TraceError, what, "make the module that does it a leaf, or enter it around the model")
        if self.check_mutable_operations and kind in ("call_function", "call_method"):
            self._refuse_write(target, kwargs)
        if kind in ("call_function", "call_method") and draws_now(name_of(target), args, kwargs):
            self._note_draw()
        node = self.graph.create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["nn_module_stack"] = self.scope.stack
        self.node_name_to_scope[node.name] = self.scope.place
        if self.record_stack_traces:
            node.stack_trace = describe(user_frame())
        return node

    def create_proxy(
        self,
        kind: str,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Any:
        """Record a call; see `TracerBase`. The node gets a qualified name when the trace is done."""
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        self._names.add(proxy.node, self.scope.module_path, name)
        return proxy

    def create_other_arg(self, a: Any) -> Argument:
        """Turn the model's own tensors and modules into `get_attr` nodes; everything else as every tracer does."""
        if isinstance(a, torch.Tensor):
            return self._tensors.argument(a)
        if isinstance(a, nn.Module):
            return self.create_node("get_attr", self.path_of_module(a), (), {})
        if isinstance(type(cast(object, a)), ProxyableClassMeta):
            return a  # made of plain values; the code refers to the object itself
        return super().create_other_arg(a)

    def where(self) -> str:
        """Say which module runs, for messages."""
        path, name = self.scope.module_path, self.root_module_name
        return f"module '{path}' of {name}" if path else name

    # -- what the replica tells --------------------------------------------------------------------------------------

    def _on_call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        original = module if self._replica is None else self._replica.originals.get(module, module)
        return self.call_module(original, forward, args, kwargs)

    def _on_read(self, module: nn.Module, name: str, value: Any) -> Any:
        return value if value is None else self.getattr(name, value, self._parameter_proxies)

    def _on_torch_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        proxy = find_proxy(args)
        if proxy is None and kwargs:
            proxy = find_proxy(kwargs)
        if proxy is None:
            return self.on_constant_call(function, args, kwargs)
        self.on_traced_call(function, args, kwargs)
        return type(proxy).__torch_function__(function, (type(proxy),), args, kwargs)

    def on_traced_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a torch call with traced arguments, which is recorded and does not run, does to real tensors."""
        if function.__name__ == "__set__":
            self._tensors.refuse_assignment(function, args[0])
        if "out" in kwargs or facts_of(function.__name__).writes_first:
            self._tensors.note_write(args, kwargs)

    def on_constant_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch call that has no traced value among its arguments."""
        return self._tensors.call(function, args, kwargs)


def is_tracing() -> bool:
    """Say whether a symbolic trace runs in this thread."""
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, _SymbolicMode) for mode in modes)


def _modes() -> tuple[int, bool]:
    # `autocast(enabled=False)` changes nothing but how many regions are open.
    return autocast_nesting(), torch.is_inference_mode_enabled()


class _SymbolicMode(FunctionMode):
    """Lets a symbolic trace see every torch call of this thread, those without a traced argument too."""
