"""Recorder: make the nodes of a trace on an example, and turn values of the model into arguments of nodes."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError
from featx.ir.arguments import Argument
from featx.ir.graph import Graph
from featx.ir.node import Node, Target
from featx.libraries import advice_for_code
from featx.tracing.environment.raised_errors import RaisedErrors
from featx.tracing.guards.scalars import TracedFloat, TracedInt, TracedNumber, plain_number
from featx.tracing.history.call_record import Record
from featx.tracing.history.earlier_calls import EarlierCalls
from featx.tracing.history.lineage import Lineage, Origin, Part, source_node
from featx.tracing.history.noted_set import NotedSet
from featx.tracing.history.opaque_call import OpaqueCall
from featx.tracing.history.write_log import WriteLog
from featx.tracing.nodes.grad_modes import GradModes
from featx.tracing.nodes.naming import QualifiedNames
from featx.tracing.nodes.scope import Scope
from featx.tracing.nodes.tracer_base import TracerBase
from featx.tracing.objects.arrays import is_array_of_numbers, tensor_of
from featx.tracing.objects.python_state import objects_in
from featx.tracing.objects.structure import holds_something_else
from featx.tracing.recording.autocast import AutocastModes
from featx.tracing.recording.guard_nodes import GuardNodes
from featx.tracing.recording.later_calls import LaterCalls
from featx.tracing.recording.numbers import Numbers
from featx.tracing.recording.returned_objects import ReturnedObjects
from featx.tracing.recording.unowned_tensors import constant_of, source_of_parameter
from featx.tracing.replica.hooks import ModelHooks
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.replica.replica import Replica
from featx.tracing.signals import (
    KEEP_WHOLE_ADVICE,
    AllNeededRecorded,
    Diverged,
    NeedsRealValues,
    UnsupportedValue,
    Untraceable,
    WritesSharedTensor,
)
from featx.tracing.source.frames import Line, describe, site_of, user_frame
from featx.tracing.source.location import source_of
from featx.tracing.source_uses.code_queries import compares_objects
from featx.tracing.source_uses.syntax_queries import is_in_try
from featx.tracing.stand_ins.stand_ins import StandIns

# Nodes that may be recorded before it is clear that the module that they are in is kept whole.
_TAKEN_BACK = 100
_NO_CHECKPOINT = (
    "if this is gradient checkpointing by an autograd.Function, switch it off in the model (use_checkpoint=False), "
    f"or {KEEP_WHOLE_ADVICE}"
)
MAY_COMPARE = "forward may use `is` to test whether a call returned its input"


class Recorder(TracerBase):
    """The graph of one trace on an example.

    Args:
        model_context: what is traced.
        replica: the copy of it that runs.
        owned: the paths of the tensors of the replica, by their ids.
        is_real: whether tensors have values.
        keep_source: note the line of the model in each node.

    Attributes:
        graph: the graph so far.
        names: collects the nodes that get qualified names.
        lineage: which node each followed value comes from.
        numbers: the numbers that the model got.
        scope: the module that runs.
        opaque_call: the call that is one node and that the running code is inside of.
        stand_ins: the tensors without values that stand for those of the model.
        earlier: what earlier calls on the same replica have kept.
        raised: what becomes of the errors that are raised in the run.
        caller: the frame that asked for the trace, while it runs.
        codes: the code that called torch.
        called: the code that ran outside of calls that are one node, with its globals; None where it is not noted.
        written_at: the lines of opened code that wrote a tensor in place, each with the path of the module that ran.
        guards: adds checks to the graph.
        hooks: the forward hooks of the model.
        write_log: notes the tensors that the trace has seen, to tell which were written.
        has_dynamic_shape: whether a kernel has run, since the last named node, whose result depends on values in its
            shape.
        most_nodes: how many nodes there may be; None is any number.
        needed: how many nodes matter, where it is known: what comes after them is not recorded.
        call_record: what forward does, where a second call is to be compared with it.
        is_compared: whether a second call is compared with this one, or with the first one of which this is a variant.
        given: what the containers and objects among the inputs held at the start, by the ids of their copies.
        compared_alias: the path of a module, and the place in its code, that may use `is` to test whether a call
            returned its input.
    """

    shows_names = True

    def __init__(
        self, model_context: ModelContext, replica: Replica, owned: dict[int, str], *, is_real: bool, keep_source: bool
    ) -> None:
        self.graph = Graph(tracer_cls=type(self))
        self.names = QualifiedNames()
        self.lineage = Lineage()
        self.scope = Scope("", None, {})
        self.opaque_call = OpaqueCall()
        self.stand_ins = StandIns(owned, model_context.results)
        self.numbers = Numbers(self, model_context, replica.size_caches)
        self.earlier = EarlierCalls()
        self.grad_modes = GradModes(self.add_unnamed_node)
        self.later_calls = LaterCalls(replica.root, replica.paths, model_context.later_names)
        self.guards = GuardNodes(self, self.later_calls)
        self.autocast_modes = AutocastModes(self.add_unnamed_node, self.guards.add)
        self.is_real = is_real
        self.owned = owned
        self.device: torch.device = model_context.device
        self.raised = RaisedErrors()
        self.caller: FrameType | None = None
        self.codes = NotedSet[CodeType]()
        self.called: dict[CodeType, dict[str, Any]] | None = None
        self.written_at = NotedSet[tuple[str, Line | None]]()
        self.write_log = WriteLog(lambda tensor: self.stand_ins.version_of(tensor))
        self.has_dynamic_shape = False
        self.most_nodes: int | None = None
        self.needed: int | None = None
        self.call_record: Record | None = None
        self.is_compared = False
        self.compared_alias: tuple[str, str] | None = None
        self.given: dict[int, dict[Any, Any]] = {}
        self.hooks = ModelHooks(model_context.hooked, replica.root, model_context.root)
        self._replica = replica
        self._keep_source = keep_source
        # The nodes that read tensors of the model, by path.
        self._reads: dict[str, Node] = {}
        # Whether new nodes get no qualified name, because the model made no call for them.
        self._makes_unnamed_nodes = False
        self._named: set[Node] = set()
        # Makes objects where the argument is what a module returns.
        self._returned: ReturnedObjects | None = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """What notes something that `mark` and `forget` take back; the graph comes last."""
        record = () if self.call_record is None else (self.call_record,)
        notes = self.names, self.lineage, self.write_log, self.numbers, self.codes, self.written_at
        return (*notes, *record, self.autocast_modes, self.graph)

    def model_frame(self) -> FrameType | None:
        """Return the frame of the model's code that runs; None inside a module of torch that is the root itself."""
        frame = user_frame()
        return None if frame is self.caller else frame

    def note_code(self, frame: FrameType, what: str) -> None:
        """Take note that the code of `frame` makes a call, which `what` says.

        Raises:
            Untraceable: the code goes on where the call fails, as it may for other inputs.
        """
        self.codes.add(frame.f_code)
        if not is_in_try(frame):
            return
        if source_of(frame.f_code, frame.f_globals) is None:
            raise Untraceable(
                f"{what} in a function with a `try` or `with`, and no source tells whether it catches errors,",
                advice="put the model into a file: source of code from standard input or `exec` cannot be read",
            )
        raise Untraceable(
            f"{what} in a `try` that catches errors, and other inputs may cause one",
            advice=advice_for_code(frame.f_globals),
        )

    def require_own_parameters(self) -> None:
        """Let the trace run for real on copies of the parameters, for code that reads or adds to their gradients.

        Raises:
            NeedsRealValues: it does not run for real.
            WritesSharedTensor: it does, on the parameters of the model.
        """
        if not self.is_real:
            raise NeedsRealValues
        if self._replica.shares_parameters:
            raise WritesSharedTensor

    def note_dynamic_shape(self) -> None:
        """Take note that a kernel runs whose result has a shape that depends on values."""
        self.has_dynamic_shape = True
        self.opaque_call.asks_for_values = self.opaque_call.asks_for_values or self.opaque_call.is_inside

    def note_dynamic_shape_of(self, node: Node) -> None:
        """Follow what is made of the result of `node`, its lengths too, if such a kernel has run for it."""
        if self.has_dynamic_shape:
            node.meta["has_dynamic_shape"], self.has_dynamic_shape = True, False
            self._named.add(node)

    def note_call(self, called: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of a call of torch, or of one that is one node, for a second call that is compared with this."""
        if self.call_record is not None:
            self.call_record.note(called, args, kwargs, result)

    def note_alias(self, alias: torch.Tensor, tensor: torch.Tensor, frame: FrameType | None) -> None:
        """Take note that code at `frame` got `alias` from a call that returned `tensor`, which it was given.

        Raises:
            Untraceable: the code uses `is`, and no second call will tell whether it notices.
        """
        if self.call_record is not None:
            self.call_record.returned_inputs[id(alias)] = tensor
        if self.compared_alias is None and frame is not None and compares_objects(frame.f_code):
            has_source = source_of(frame.f_code, frame.f_globals) is not None
            if not self.is_compared and has_source:
                raise Untraceable(MAY_COMPARE)
            missing = "" if has_source else " (it has no source to tell: put the model into a file)"
            self.compared_alias = self.scope.module_path, describe(frame) + missing

    # -- values ------------------------------------------------------------------------------------------------------

    def is_followed(self, values: tuple[Any, ...]) -> bool:
        """Say whether there is an input, a parameter, or what was made of them or of sizes, among values."""
        for value in values:
            if isinstance(value, torch.Tensor):
                origin = self.lineage.get(value)
                if origin is None:
                    is_parameter = isinstance(value, nn.Parameter) and id(value) not in self.earlier.constants
                    if is_parameter or self.is_unseen(value) or id(value) in self.earlier.of_sizes:
                        return True
                elif self.is_named(origin):
                    return True
            elif isinstance(value, TracedNumber):
                return True
            elif isinstance(value, (tuple, list)):
                if self.is_followed(tuple(value)):
                    return True
            elif isinstance(value, slice) and self.is_followed((value.start, value.stop, value.step)):
                return True
            elif isinstance(value, torch.device):
                # That of an input or parameter, as in a symbolic trace, where a call with it is a node.
                origin = self.lineage.get(value)
                if origin is not None and self.is_named(origin):
                    return True
        return False

    def is_unseen(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is of this trace and no recorded call returned it.

        It comes from code that does not pass through the function mode.
        """
        if id(tensor) in self.owned or id(tensor) in self.earlier.constants:
            return False
        return self.opaque_call.has_made(tensor) or (tensor.is_meta and self.device.type != "meta")

    def is_of_graph(self, values: tuple[Any, ...]) -> bool:
        """Say whether there is a tensor of the model, or one that is followed, among values."""
        return any(
            isinstance(value, torch.Tensor) and (self.lineage.get(value) is not None or id(value) in self.owned)
            for value in values
        )

    def _is_of_trace(self, value: object) -> bool:
        """Say whether a value belongs to this trace: a followed tensor or number, or a module of the replica."""
        if isinstance(value, TracedNumber):
            return value.trace is self.numbers
        if isinstance(value, nn.Module):
            return value in self._replica.paths
        return self.is_of_graph((value,))

    def is_made_here(self, value: Any) -> bool:
        """Say whether a value is a tensor that this trace has made."""
        if not isinstance(value, torch.Tensor) or id(value) in self.owned:
            return False
        return self.lineage.get(value) is not None or value.is_meta

    def is_named(self, origin: Origin) -> bool:
        """Say whether a value comes from a call that has a name: one of what is followed."""
        return source_node(origin) in self._named

    def path_of_module(self, module: nn.Module) -> str:
        """Return the path of a module in the root, the first one where it has several."""
        path = self._replica.paths.get(module)
        if path is None:
            raise Untraceable(f"a {type(module).__name__} that is not registered as a submodule is used")
        return path

    # -- nodes -------------------------------------------------------------------------------------------------------

    def node_of(self, origin: Origin) -> Node:
        """Return the node of an origin, made now where it is a part that was not used yet."""
        if isinstance(origin, Node):
            return origin
        node = origin.node
        if self._makes_unnamed_nodes:
            return self.add_unnamed_node("call_function", origin.function, (self.node_of(origin.owner), origin.key), {})
        if node is None or node.is_erased:
            owner = self.node_of(origin.owner)
            if self.is_named(owner) and not owner.meta.get("is_apart"):
                node = self.add_node("call_function", origin.function, (owner, origin.key), {}, None, None)
                if owner.meta.get("is_opaque_module") or owner.meta.get("is_part_of_opaque"):
                    node.meta["is_part_of_opaque"] = True
            else:
                node = self.add_unnamed_node("call_function", origin.function, (owner, origin.key), {}, None)
            origin.node = node
        return node

    def unnamed_node_of(self, origin: Origin) -> Node:
        """Return a node for an origin that counts in no name; of a part, one that nothing else uses."""
        with self._unnamed():
            return self.node_of(origin)

    @contextmanager
    def _unnamed(self) -> Generator[None]:
        was, self._makes_unnamed_nodes = self._makes_unnamed_nodes, True
        try:
            yield
        finally:
            self._makes_unnamed_nodes = was

    def add_node(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], stem: str | None,
        frame: FrameType | None,
    ) -> Node:  # fmt: skip
        """Add a node that gets a qualified name when the trace is done."""
        node = self.add_unnamed_node(op, target, args, kwargs, stem)
        self.note_dynamic_shape_of(node)
        self._named.add(node)
        frame = frame or self.model_frame()
        path = self.scope.module_path if op != "call_module" else cast(str, target)
        self.names.add(node, path, stem, site_of(frame))
        if self._keep_source and frame is not None:
            node.meta["source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return node

    def add_unnamed_node(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], name: str | None = None
    ) -> Node:
        """Add a node for what the model does without a call of its own: checks, attributes, parts, modes.

        Raises:
            Untraceable: forward has switched a mode that no graph can switch.
            Diverged: there are too many nodes.
        """
        self.autocast_modes.follow()
        if torch.is_inference_mode_enabled():
            raise Untraceable("forward enters torch.inference_mode")
        if torch.is_grad_enabled() is not self.grad_modes.is_enabled:
            raise Untraceable(
                "the gradient mode is switched outside of recorded calls, as torch.autograd.Function and reentrant "
                "checkpoints do,"
            )
        if self.most_nodes is not None and len(self.graph.nodes) >= self.most_nodes:
            raise Diverged
        # What is recorded and taken back counts for a while.
        needed = self.needed
        if needed is not None and len(self.graph.nodes) > needed + _TAKEN_BACK and not self.opaque_call.is_inside:
            raise AllNeededRecorded
        node = self.graph.create_node(op, target, args, kwargs, name)
        node.meta["nn_module_stack"] = self.scope.stack
        return node

    def follow_apart(self, node: Node) -> None:
        """Let values of `node`, which `add_apart` has made and which counts in no name, be followed as others are."""
        self._named.add(node)

    @property
    def has_all_needed_nodes(self) -> bool:
        """Whether all nodes are there that matter."""
        return self.needed is not None and len(self.graph.nodes) >= self.needed

    def note_form(self, node: Node, tensor: torch.Tensor) -> None:
        """Note the form of the tensor that a node gave, and its version."""
        meta = node.meta
        meta["dtype"] = tensor.dtype
        if tensor.layout != torch.strided or not tensor.is_nested:
            meta["shape"] = tensor.shape
        self.write_log.note_result(node, tensor)

    # -- arguments ---------------------------------------------------------------------------------------------------

    def create_args(self, values: Iterable[Any]) -> tuple[Argument, ...]:
        """Turn values of the model into arguments of a node."""
        return tuple([self.create_arg(value) for value in values])

    @contextmanager
    def in_scope(self, scope: Scope) -> Generator[None]:
        """Record as in another scope for a while."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    def create_kwargs(self, values: dict[str, Any]) -> dict[str, Argument]:
        """Turn values of the model into keyword arguments of a node."""
        return {key: self.create_arg(value) for key, value in values.items()} if values else {}

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the model into an argument of a node: what is followed becomes its node, at any depth."""
        kind = type(a)
        if kind is torch.Tensor or kind is nn.Parameter:
            return self._tensor(a)
        if kind is TracedInt or kind is TracedFloat:
            return self.node_of(a.origin) if a.trace is self.numbers else plain_number(a)
        if kind is torch.device or kind is torch.Size:
            origin = self.lineage.get(a)
            if origin is not None:
                return self.node_of(origin)
            if kind is torch.device:
                return a
            sizes = self.create_args(a)
            return sizes if self._returned is None else self._returned.size(sizes)
        return super().create_arg(a)

    def create_unnamed_arg(self, a: Any) -> Argument:
        """Do as `create_arg`, with nodes that count in no name and that nothing else uses."""
        with self._unnamed():
            return self.create_arg(a)

    def create_result(self, a: Any, *, is_unnamed: bool = False) -> Argument:
        """Turn what a module returns into an argument. Objects in it become calls that build them."""
        self._returned = ReturnedObjects(self.create_node, self.create_arg)
        try:
            return self.create_unnamed_arg(a) if is_unnamed else self.create_arg(a)
        finally:
            self._returned = None

    def create_other_arg(self, a: Any) -> Argument:
        """Turn tensors of other classes, modules and generators into arguments, and all else as every tracer does."""
        if isinstance(a, torch.Tensor):
            return self._tensor(a)
        if isinstance(a, nn.Module):
            return self.add_unnamed_node("get_attr", self.path_of_module(a), (), {})
        if isinstance(a, torch.Generator):
            raise Untraceable("a random generator is passed to a call")
        origin = self.lineage.get(a)
        if origin is not None and not holds_something_else(a, self.given):
            return self.node_of(origin)
        made = None if self._returned is None else self._returned.create(a)
        if made is not None:
            return made
        if isinstance(a, weakref.ref):
            raise UnsupportedValue("a weak reference is passed to a call or returned, perhaps inside an object,", a)
        if callable(a) and any(map(self._is_of_trace, objects_in(a))):
            raise UnsupportedValue(
                "a function that holds values of forward is passed to a call that is one node",
                a,
                advice=_NO_CHECKPOINT,
            )
        if is_array_of_numbers(a):  # which no call has computed from values of a tensor
            return tensor_of(a)
        try:
            return super().create_other_arg(a)
        except ArgumentTypeError:
            raise UnsupportedValue(
                f"a {type(a).__name__}, which no graph can hold, is passed on or returned", a
            ) from None

    def _tensor(self, tensor: torch.Tensor) -> Argument:
        origin = self.lineage.get(tensor)
        if origin is not None:
            return self.node_of(origin)
        if self.hooks.keep(tensor):
            self.hooks.refuse_stored()
        self.earlier.refuse(tensor)
        path = self.owned.get(id(tensor))
        if path is None:
            self.hooks.check_foreign()
            parameter = self.follow_new_parameter(tensor)
            if parameter is not None:
                return parameter
            followed = (each for each, _ in self.write_log.memories)
            return constant_of(tensor, self._replica, followed, is_unseen=self.is_unseen(tensor))
        node = self._reads.get(path)
        if self._makes_unnamed_nodes:
            return self.add_unnamed_node("get_attr", path, (), {})
        if node is None or node.is_erased:
            if isinstance(tensor, nn.Parameter):
                node = self.add_node("get_attr", path, (), {}, None, None)
            else:
                node = self.add_unnamed_node("get_attr", path, (), {})
            self._reads[path] = node
            self.note_form(node, tensor if self.is_real else self.stand_ins.of(tensor))
        return node

    def follow_new_parameter(self, parameter: torch.Tensor) -> Node | None:
        """Follow a parameter that forward has made of a tensor, and return its node; None where a tensor is none."""
        source = source_of_parameter(parameter, self.write_log.memories)
        if source is None:
            return None
        keywords: dict[str, Argument] = {} if parameter.requires_grad else {"requires_grad": False}
        node = self.add_unnamed_node("call_function", nn.Parameter, (self._tensor(source),), keywords)
        self.lineage.put(parameter, node)
        self.note_form(node, parameter)
        self.write_log.note_memory(parameter)
        return node

    def sources_of(self, tensor: torch.Tensor) -> Iterator[Node]:
        """Yield the node whose value a tensor is, and those of what holds it, from the inside out; no node is made."""
        origin = self.lineage.get(tensor) or self._reads.get(self.owned.get(id(tensor), ""))
        while isinstance(origin, Part):
            if origin.node is not None:
                yield origin.node
            origin = origin.owner
        if origin is not None:
            yield origin
