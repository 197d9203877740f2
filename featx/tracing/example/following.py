"""Following: know which node each value of a running trace comes from, and make nodes of what is done with it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from featx.errors import ArgumentTypeError
from featx.ir.arguments import Argument
from featx.ir.graph import Graph
from featx.ir.node import Node, Target
from featx.tracing.base import TracerBase
from featx.tracing.checks.replay import Record, Replay
from featx.tracing.environment.switches import switches
from featx.tracing.example.autocast import AutocastModes
from featx.tracing.example.lineage import Lineage, Origin, Part
from featx.tracing.grad_modes import GradModes
from featx.tracing.guards.conversions import converts_by_calls_alone
from featx.tracing.guards.guards import check_decision, check_form, form_of
from featx.tracing.guards.scalars import Disguise, Diverged, TracedFloat, TracedInt, larger, plain_number, traced_number
from featx.tracing.naming import QualifiedNames
from featx.tracing.signals import Converts, LeftBehind, Unfollowable, Unholdable
from featx.tracing.source.conditional_writes import Line
from featx.tracing.source.frames import describe, is_comparison, user_frame, what_follows, writes_a_message
from featx.tracing.stand_ins.stand_ins import StandIns
from featx.tracing.symbolic.constants import memory_of
from featx.tracing.symbolic.tracer import Scope
from featx.tree import tree_leaves


class Following(TracerBase):
    """The graph of one trace on an example, and the values that are followed in it."""

    def __init__(self, paths: dict[int, str], device: torch.device, *, is_real: bool, keep_source: bool) -> None:
        self.graph = Graph(tracer_cls=type(self))
        self.names = QualifiedNames()
        self.lineage = Lineage()
        self.scope = Scope("", None, {})
        # How many modules that are kept whole the running code is inside.
        self.whole = 0
        self.is_active = True
        # The checks of dtypes that Python has seen.
        self.dtype_checks: list[Node] = []
        # The frame that asked for the trace, while it runs.
        self.caller: FrameType | None = None
        self.is_real = is_real
        # The sizes and other numbers that the model got, in order, and those of an earlier trace at other sizes.
        self.numbers: list[int | float] = []
        self.number_origins: list[Origin] = []
        # Which of them are disguised although they are what they were before.
        self.disguised: frozenset[int] = frozenset()
        # Whether a kernel has run, since the last call that was recorded, whose result depends on values in its shape.
        self.has_dynamic_shape = False
        self.expected_numbers: list[int | float] | None = None
        # As what C code sees the numbers that differ.
        self.disguise: Disguise = larger
        self._most_nodes: int | None = None
        # What a trace for real read of values, by the names of the questions, and what an earlier one did.
        self.answers: list[tuple[str, Any]] = []
        self.expected_answers: deque[tuple[str, Any]] = deque()
        # Whether Python has seen a size, so that it may have made something of it that no node shows.
        self.saw_sizes = False
        # Whether it saw a whole shape, of which Python may count the dimensions unheard.
        self.saw_shapes = False
        self.drew = False
        # Attributes that are not there during this trace, and those that forward reads before it assigns them: the
        # paths of modules, and names.
        self.absent: set[tuple[str, str]] = set()
        self.read_first: set[tuple[str, str]] = set()
        # The globals in which calls of `int`, `float` and `len` are followed.
        self.converting: list[dict[str, Any]] = []
        # The code that called torch.
        self.codes: set[CodeType] = set()
        # Whether calls draw, by name.
        self._draws: dict[str, bool] = {}
        # What ran on a value of the trace where no call told of it.
        self.unseen: Unfollowable | None = None
        # Whether a module that is kept whole had its hands on memory in a way that no version tells.
        self.wrote_unseen = False
        self.wrote_model = False
        # The modules that ran inside the last call that is one node, and the lines that wrote something there.
        self.ran: set[nn.Module] = set()
        self.written_at: set[Line | None] = set()
        # How the switches of the process are set.
        self._switches = switches()
        self._paths = paths
        self._device = device
        self._keep_source = keep_source
        self.stand_ins = StandIns(paths)
        self._attributes: dict[str, Node] = {}
        # Whether nodes are made that the model does not ask for, and that count in no name.
        self._is_aside = False
        self._named: set[Node] = set()
        self._grad_modes = GradModes(self._create_plain_node)
        self._autocast_modes = AutocastModes(self._create_plain_node)
        # The tensors that nodes gave, with the version that they had then.
        self.versions: list[tuple[Node, torch.Tensor, int]] = []
        # Memory that may be written without a new version.
        self.uncounted: set[int] = set()
        # Whether an opened module has given a tensor other memory.
        self.gave_memory = False
        # Memory of tensors that the model may know as one object, and the trace as several.
        self._renamed: set[int] = set()
        # Tensors that an earlier call on the same replica has made and kept, by id: those computed from its inputs, and
        # those made from sizes and constants, such as caches.
        self.from_earlier_inputs: dict[int, torch.Tensor] = {}
        self.earlier_constants: dict[int, torch.Tensor] = {}
        # What forward has kept of its inputs in a container, where a next call may find it.
        self.keeps_of_input: str | None = None
        # What forward does, where a second call is to be compared with it.
        self.call_record: Record | None = None
        # What answers, while a second call is compared with it.
        self.replay: Replay | None = None
        # The containers and objects in the inputs: the name of the input, the copy, and what it held at the start.
        self.given: list[tuple[str, Any, dict[Any, Any]]] = []
        # The tensors that are followed, with their memory.
        self.memories: list[tuple[torch.Tensor, int]] = []

    def model_frame(self) -> FrameType | None:
        """Return the frame of the model's code that runs; None inside a module of torch that is the root itself."""
        frame = user_frame()
        return None if frame is self.caller else frame

    def _is_followed(self, values: tuple[Any, ...]) -> bool:
        # Inputs, parameters, and what was made of them or of traced sizes.
        for value in values:
            if isinstance(value, torch.Tensor):
                origin = self.lineage.get(value)
                if origin is None:
                    is_parameter = isinstance(value, nn.Parameter) and id(value) not in self.earlier_constants
                    if is_parameter or self._is_unseen(value):
                        return True
                elif self._is_named(origin):
                    return True
            elif isinstance(value, (TracedInt, TracedFloat)):
                return True
            elif isinstance(value, (tuple, list)):
                if self._is_followed(tuple(value)):
                    return True
            elif isinstance(value, slice) and self._is_followed((value.start, value.stop, value.step)):
                return True
            elif isinstance(value, torch.device):
                # That of an input or parameter, as in a symbolic trace, where a call with it is a node.
                origin = self.lineage.get(value)
                if origin is not None and self._is_named(origin):
                    return True
        return False

    def _is_unseen(self, tensor: torch.Tensor) -> bool:
        # A stand-in that no call gave comes from code that torch does not tell of.
        is_known = id(tensor) in self._paths or id(tensor) in self.earlier_constants
        return tensor.is_meta and self._device.type != "meta" and not is_known

    def check_unseen(self) -> None:
        """Raise where something ran that a graph would miss."""
        if self.unseen is not None:
            raise self.unseen

    def _is_of_graph(self, values: tuple[Any, ...]) -> bool:
        return any(
            isinstance(value, torch.Tensor) and (self.lineage.get(value) is not None or id(value) in self._paths)
            for value in values
        )

    def _is_named(self, origin: Origin) -> bool:
        while isinstance(origin, Part):
            origin = origin.owner
        return origin in self._named

    # -- results -----------------------------------------------------------------------------------------------------

    def follow(self, value: Any, origin: Origin, frame: FrameType | None) -> Any:
        """Return the value of `origin` so that whatever is done with it, or with a part of it, is followed."""
        if isinstance(value, torch.Tensor):
            self.lineage.put(value, origin)
            self.memories.append((value, memory_of(value)))
            if isinstance(origin, Node):
                self._describe(origin, value)
            return value
        if value is None:
            return value
        if isinstance(value, (bool, str, torch.dtype, torch.layout)):
            self._guard(self.node_of(origin), value, "an answer")
            return value
        if isinstance(value, (int, float)):
            self.saw_sizes = True
            return self._number(plain_number(value), origin)
        if isinstance(value, torch.device):
            self.lineage.put(value, origin)
            return value
        if isinstance(value, torch.Size):
            return self._follow_size(value, origin, frame)
        if isinstance(value, (tuple, list)):
            return self._follow_items(cast(tuple[Any, ...], value), origin, frame)
        if isinstance(value, dict):
            for key, item in list(cast(dict[Any, Any], value).items()):
                followed = self.follow(item, Part(origin, operator.getitem, key), None)
                if followed is not item:
                    value[key] = followed
            return value
        return self._follow_object(value, origin)

    def _follow_size(self, size: torch.Size, origin: Origin, frame: FrameType | None) -> torch.Size:
        self.saw_sizes = self.saw_shapes = True
        parts = [Part(origin, operator.getitem, index) for index in range(len(size))]
        numbers = [self._number(plain_number(n), part) for n, part in zip(size, parts, strict=True)]
        followed = torch.Size(numbers)
        self.lineage.put(followed, origin)
        if frame is not None:
            steps = what_follows(frame)
            if "attribute numel" in steps:  # which multiplies in C: none is 0 where none was
                for number in numbers[steps[0]] if isinstance(steps[0], slice) else numbers:
                    bool(number)
            if steps and isinstance(steps[0], slice):
                # A symbolic trace has a node for the slice, which counts in names.
                self.names.skip(self.scope.module_path, "getitem")
                taken = parts[steps[0]]
                self._make_taken(steps[1:], taken)
            else:
                self._make_taken(steps, parts)
        return followed

    def _follow_items(self, items: Any, origin: Origin, frame: FrameType | None) -> Any:
        parts = [Part(origin, operator.getitem, index) for index in range(len(items))]
        steps = what_follows(frame) if frame is not None else []
        followed = [self.follow(item, part, None) for item, part in zip(items, parts, strict=True)]
        is_unpacked = self._make_taken(steps, parts)
        if type(items) is tuple and not hasattr(items, "_fields"):
            same = all(map(operator.is_, items, followed))
            items = items if same else tuple(followed)
        elif type(items) is list:
            items[:] = followed
        if isinstance(origin, Node) and not is_unpacked and origin.op != "call_module" and type(items) in (tuple, list):
            # A loop may run over it; how often depends on a size, mostly.
            length = self._create_plain_node("call_function", len, (origin,), {}, None)
            self._guard(length, len(items), "how many tensors a call gives")
        return items

    def _make_taken(self, steps: list[int | slice | str], parts: list[Part]) -> bool:
        """Make nodes of the parts that the code takes at once, in the order in which a symbolic trace makes them."""
        first = steps[0] if steps else None
        if isinstance(first, str) and first == f"unpack {len(parts)}":
            for part in parts:
                self.node_of(part)
            return True
        if isinstance(first, int) and -len(parts) <= first < len(parts):
            self.node_of(parts[first])
            return True
        return False

    def _follow_object(self, value: Any, origin: Origin) -> Any:
        fields: dict[str, Any] = getattr(value, "__dict__", {})
        for name, item in list(fields.items()):
            if isinstance(item, torch.Tensor):
                self.lineage.put(item, Part(origin, getattr, name))
        return value

    def note_dynamic_shape(self) -> None:
        """Take note that a kernel runs whose result has a shape that depends on values."""
        self.has_dynamic_shape = True

    def _describe(self, node: Node, tensor: torch.Tensor) -> None:
        meta = node.meta
        meta["dtype"] = tensor.dtype
        if tensor.layout != torch.strided or not tensor.is_nested:
            meta["shape"] = tensor.shape
        if not tensor.is_inference():
            self.versions.append((node, tensor, tensor._version))

    def compare_with(self, earlier: Following) -> None:
        """Disguise the numbers that are others than in an earlier trace, and end with `Diverged` where it did less.

        Where that was a trace for real, this one may be told what it read.
        """
        self.expected_numbers = earlier.numbers
        self.expected_answers = deque(earlier.answers)
        # What is recorded and taken back counts for a while.
        self._most_nodes = 2 * len(earlier.graph.nodes) + 1000

    def _number(self, value: int | float, origin: Origin) -> Any:
        position = len(self.numbers)
        self.numbers.append(value)
        self.number_origins.append(origin)
        if position in self.disguised:
            return traced_number(value, origin, self, self.disguise(value))
        expected = self.expected_numbers
        earlier = expected[position] if expected is not None and position < len(expected) else None
        # In another dtype, what is made of a number is a constant that may differ, and has to be the true one.
        if expected is None or earlier == value or self.stand_ins.is_cast:
            return traced_number(value, origin, self)
        # Made of what it was, the remainders of what is shown are others than they were.
        return traced_number(value, origin, self, self.disguise(value if earlier is None else earlier))

    # -- the trace of numbers ----------------------------------------------------------------------------------------

    def is_recording(self) -> bool:
        """Say whether what the running code does with numbers is recorded."""
        return self.is_active and not self.whole

    def on_conversion(self) -> None:
        """Ask for another trace, which follows what the running code converts, where that can be.

        Raises:
            Converts: it can.
        """
        frame = self.model_frame()
        if frame is None or any(frame.f_globals is known for known in self.converting):
            return
        if converts_by_calls_alone(frame):
            raise Converts(frame.f_globals)

    def is_message(self) -> bool:
        """Say whether the text that the running code makes only tells a person something."""
        frame = self.model_frame()
        return frame is None or writes_a_message(frame)

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """Record arithmetic on traced numbers."""
        if not isinstance(result, (int, float)):
            return result
        node = self.add_node(
            "call_function", function, tuple([self.create_arg(value) for value in args]), {}, None, None
        )
        is_disguised = any(isinstance(value, (TracedInt, TracedFloat)) and value.is_disguised for value in args)
        return traced_number(result, node, self, self.disguise(result) if is_disguised else None)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...], result: bool) -> None:
        """Record that Python saw a relation between numbers to hold, or not to."""
        arguments = tuple([self.create_arg(value) for value in args])
        frame = self.model_frame()
        if frame is not None and is_comparison(frame):
            node = self.add_node("call_function", function, arguments, {}, None, frame)
        else:  # a dict, or the cache of a function, looks for a key: how often depends on what is in it
            node = self._create_plain_node("call_function", function, arguments, {})
        self._guard(node, result, f"{arguments[0]} {function.__name__} {arguments[1]}")

    def _check_form(self, node: Node, value: Any, what: str) -> None:
        check = self._create_plain_node("call_function", check_form, (node, form_of(value), what), {})
        check.meta["is_guard"] = check.meta["is_form_check"] = True

    def _guard(self, node: Node, value: Any, what: str) -> Node:
        frame = self.model_frame()
        where = f" {describe(frame)}" if frame is not None else ""
        check = self._create_plain_node("call_function", check_decision, (node, value, f"{what}{where}"), {}, None)
        check.meta["is_guard"] = True
        if isinstance(value, torch.dtype):
            self.dtype_checks.append(check)
        return check

    # -- nodes -------------------------------------------------------------------------------------------------------

    def node_of(self, origin: Origin) -> Node:
        """Return the node of an origin, made now where it is a part that nobody has used yet."""
        if isinstance(origin, Node):
            return origin
        node = origin.node
        if self._is_aside:
            return self._create_plain_node(
                "call_function", origin.function, (self.node_of(origin.owner), origin.key), {}
            )
        if node is None or node.is_erased:
            owner = self.node_of(origin.owner)
            if self._is_named(owner):
                node = self.add_node("call_function", origin.function, (owner, origin.key), {}, None, None)
                if owner.meta.get("is_whole") or owner.meta.get("is_part_of_whole"):
                    node.meta["is_part_of_whole"] = True
            else:
                node = self._create_plain_node("call_function", origin.function, (owner, origin.key), {}, None)
            origin.node = node
        return node

    def add_node(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], stem: str | None,
        frame: FrameType | None,
    ) -> Node:  # fmt: skip
        """Add a node that gets a qualified name when the trace is done."""
        node = self._create_plain_node(op, target, args, kwargs, stem)
        if self.has_dynamic_shape:
            node.meta["has_dynamic_shape"], self.has_dynamic_shape = True, False
        self._named.add(node)
        self.names.add(node, self.scope.module_path if op != "call_module" else cast(str, target), stem)
        if self._keep_source:
            frame = frame or self.model_frame()
            if frame is not None:
                node.meta["source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return node

    def _create_plain_node(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], name: str | None = None
    ) -> Node:
        self._autocast_modes.follow()
        if torch.is_inference_mode_enabled():
            raise Unfollowable("forward enters torch.inference_mode")
        if torch.is_grad_enabled() is not self._grad_modes.is_enabled:
            raise Unfollowable(
                "gradients are switched where the trace does not see it, as torch.autograd.Function and reentrant "
                "checkpoints do,"
            )
        if self._most_nodes is not None and len(self.graph.nodes) >= self._most_nodes:
            raise Diverged
        node = self.graph.create_node(op, target, args, kwargs, name)
        node.meta["nn_module_stack"] = self.scope.stack
        return node

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the model into an argument of a node: what is followed becomes its node, at any depth."""
        kind = type(a)
        if kind is torch.Tensor or kind is nn.Parameter:
            return self._tensor(a)
        if kind is TracedInt or kind is TracedFloat:
            return self.node_of(a.origin) if a.trace is self else plain_number(a)
        if kind is torch.device or kind is torch.Size:
            origin = self.lineage.get(a)
            if origin is not None:
                return self.node_of(origin)
            return a if kind is torch.device else tuple([self.create_arg(item) for item in a])
        return super().create_arg(a)

    def create_arg_aside(self, a: Any) -> Argument:
        """Do as `create_arg`, with nodes that count in no name and that nothing else uses."""
        self._is_aside = True
        try:
            return self.create_arg(a)
        finally:
            self._is_aside = False

    def create_other_arg(self, a: Any) -> Argument:
        """Turn tensors of other classes, modules and generators into arguments, and all else as every tracer does."""
        if isinstance(a, torch.Tensor):
            return self._tensor(a)
        if isinstance(a, nn.Module):
            path = self.path_of_module(a)
            return self._create_plain_node("get_attr", path, (), {})
        if isinstance(a, torch.Generator):
            raise Unfollowable("a random generator is passed to a call")
        origin = self.lineage.get(a)
        if origin is not None:
            return self.node_of(origin)
        try:
            return super().create_other_arg(a)
        except ArgumentTypeError:
            raise Unholdable(f"a {type(a).__name__}, which no graph can hold, is passed on or returned") from None

    def refuse_earlier(self, *values: Any) -> None:
        """Raise where one of these is a tensor that an earlier call has computed from its inputs."""
        if self.from_earlier_inputs and any(id(leaf) in self.from_earlier_inputs for leaf in tree_leaves(values)):
            raise LeftBehind("forward reads what it has computed from the inputs of an earlier call")

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stands in the graph for a constant of the replica."""
        return tensor

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the path of a module in the root."""
        raise NotImplementedError

    def check_constant(self, tensor: torch.Tensor) -> None:
        """Raise where a tensor that was there before the trace may be another one in the next call."""

    def _tensor(self, tensor: torch.Tensor) -> Argument:
        origin = self.lineage.get(tensor)
        if origin is not None:
            return self.node_of(origin)
        self.check_constant(tensor)
        self.refuse_earlier(tensor)
        path = self._paths.get(id(tensor))
        if path is None:
            if id(tensor) in self.earlier_constants:
                return tensor
            if isinstance(tensor, nn.Parameter):
                raise Unfollowable(f"a parameter of shape {tuple(tensor.shape)} that the model does not own is used")
            if is_functorch_wrapped_tensor(tensor):
                raise Unfollowable("a function of torch.func (vmap, grad) calls torch")
            if self._is_unseen(tensor):
                raise Unfollowable("a tensor is used that was made where the trace does not see it")
            return self.original_of(tensor)
        node = self._attributes.get(path)
        if self._is_aside:
            return self._create_plain_node("get_attr", path, (), {})
        if node is None or node.is_erased:
            if isinstance(tensor, nn.Parameter):
                node = self.add_node("get_attr", path, (), {}, None, None)
            else:
                node = self._create_plain_node("get_attr", path, (), {})
            self._attributes[path] = node
            self._describe(node, tensor if self.is_real else self.stand_ins.of(tensor))
        return node
