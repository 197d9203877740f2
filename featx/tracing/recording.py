"""Recording: turn the torch calls that really run into nodes, and what they give into values that are followed."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from featx.ir.effects import draws_now, operator_writes
from featx.ir.graph import Graph
from featx.ir.node import Argument, Node, Target
from featx.tracing.autocast import AutocastModes
from featx.tracing.frames import describe, is_library_code, user_frame, what_follows, written_operator
from featx.tracing.grad_modes import GradModes
from featx.tracing.guards import check_decision, check_form, form_of
from featx.tracing.lineage import Lineage, Origin, Part
from featx.tracing.naming import QualifiedNames
from featx.tracing.operators import MAGIC, OPERATORS, READS_VALUES, REFLECTED
from featx.tracing.scalars import TracedFloat, TracedInt, plain_number, traced_number
from featx.tracing.standins import StandIns
from featx.tracing.symbolic import Scope
from featx.tracing.tracer import TracerBase

_NUMBERS = (TracedInt, TracedFloat)
# Attributes of a tensor that answer about its form or place; the answer is part of what was decided on the example.
_ASKED_FORM = frozenset({"is_cuda", "is_cpu", "is_sparse", "is_quantized", "requires_grad", "names", "layout"})


class Unfollowable(BaseException):
    """Something in an opened module that no graph can hold. No Exception, so that no model catches it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.place = what, describe(user_frame())


class NeedsValues(BaseException):
    """The model asks for a value, which stand-ins have not."""


class Recording(TracerBase):
    """The state of one trace on an example, and what it does with each torch call."""

    def __init__(self, paths: dict[int, str], device: torch.device, *, is_real: bool, keep_source: bool) -> None:
        self.graph = Graph(tracer_cls=type(self))
        self.names = QualifiedNames()
        self.lineage = Lineage()
        self.scope = Scope("", None, {})
        # How many modules that are kept whole the running code is inside.
        self.whole = 0
        self.is_active = True
        self.is_real = is_real
        # Whether Python has seen a size, so that it may have made something of it that no node shows.
        self.saw_sizes = False
        # Whether it has computed a remainder, which one other size may well leave the same.
        self.did_modulo = False
        self.drew = False
        self.wrote_model = False
        self._paths = paths
        self._device = device
        self._keep_source = keep_source
        self.stand_ins = StandIns(paths)
        self._attributes: dict[str, Node] = {}
        self._named: set[Node] = set()
        self._grad_modes = GradModes(self._create_plain_node)
        self._autocast_modes = AutocastModes(self._create_plain_node)
        # The tensors that nodes gave, with the version that they had then.
        self.versions: list[tuple[Node, torch.Tensor, int]] = []

    # -- torch calls -------------------------------------------------------------------------------------------------

    def on_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch call: run it and, outside modules that are kept whole, record it."""
        name = function.__name__
        if name == "__get__":
            return self._attribute(cast(Any, function).__self__.__name__, function, args[0])
        if self.whole:
            return self.execute(function, args, kwargs)
        if function is torch._C._set_grad_enabled:
            self._grad_modes.record(args[0])
            return function(*args)
        if name == "__set__":
            raise Unfollowable(f"'{cast(Any, function).__self__.__name__}' of a tensor is assigned")
        if name in ("set_", "resize_", "resize_as_"):
            raise Unfollowable(f"a tensor gets other memory ({name})")
        if name in ("dim", "ndimension"):
            return function(*args, **kwargs)
        if name in READS_VALUES:
            return self._read_value(name, function, args, kwargs)
        if name == "__len__":
            return self._pinned(len, args, function(*args))
        if operator_writes(name) or "out" in kwargs:
            self._refuse_foreign((*args[:1], kwargs.get("out")))
        if not self._is_followed(args) and not (kwargs and self._is_followed(tuple(kwargs.values()))):
            return self._on_constants(function, args, kwargs)
        return self.record(function, args, kwargs)

    def _refuse_foreign(self, targets: tuple[Any, ...]) -> None:
        for target in targets:
            if not isinstance(target, torch.Tensor) or self._is_of_graph((target,)) or self._is_unseen(target):
                continue
            raise Unfollowable(f"a tensor of shape {tuple(target.shape)} that the model does not own is written")

    def execute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call on stand-ins, or for real where this trace is one."""
        name = function.__name__
        self.drew = self.drew or draws_now(name, args, kwargs)
        if self.stand_ins.writes_model(function, args, kwargs):
            self.wrote_model = True
            self.before_write(args, kwargs)
        if self.is_real:
            return function(*args, **kwargs)
        if name in READS_VALUES and any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            raise NeedsValues
        return self.stand_ins.run(function, args, kwargs)

    def before_write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called ahead of a call that writes into tensors of the model; a trace for real saves them."""

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call, make a node of it, and return its result as a followed value."""
        arguments = tuple([self.create_arg(value) for value in args])
        keywords = {key: self.create_arg(value) for key, value in kwargs.items()} if kwargs else {}
        result = self.execute(function, args, kwargs)
        if args and result is args[0] and isinstance(result, torch.Tensor) and not operator_writes(function.__name__):
            result = another_name(result)
        frame = self._user_frame()
        op, target, arguments, stem = _as_written(function, arguments, keywords, frame)
        node = self.add_node(op, target, arguments, keywords, stem, frame)
        return self.follow(result, node, frame)

    def _user_frame(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and is_library_code(frame.f_code):
            frame = frame.f_back
        return frame

    def _on_constants(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # No input of the model is involved. Where a tensor comes out it is recorded, without a name, as it may be
        # written later and must be made anew in each call; anything else is a plain value.
        result = self.execute(function, args, kwargs)
        if isinstance(result, torch.Tensor) or _holds_tensors(result):
            arguments = tuple([self.create_arg(value) for value in args])
            keywords = {key: self.create_arg(value) for key, value in kwargs.items()} if kwargs else {}
            frame = self._user_frame()
            op, target, arguments, stem = _as_written(function, arguments, keywords, frame)
            node = self._create_plain_node(op, target, arguments, keywords, stem)
            return self.follow(result, node, frame)
        return result

    def _is_followed(self, values: tuple[Any, ...]) -> bool:
        # Inputs, parameters, and what was made of them or of traced sizes.
        for value in values:
            if isinstance(value, torch.Tensor):
                origin = self.lineage.get(value)
                if origin is None:
                    if isinstance(value, nn.Parameter) or self._is_unseen(value):
                        return True
                elif self._is_named(origin):
                    return True
            elif isinstance(value, _NUMBERS):
                return True
            elif isinstance(value, (tuple, list)):
                if self._is_followed(tuple(value)):
                    return True
            elif isinstance(value, slice) and self._is_followed((value.start, value.stop, value.step)):
                return True
        return False

    def _is_unseen(self, tensor: torch.Tensor) -> bool:
        # A stand-in that no call gave comes from code that torch does not tell of.
        return tensor.is_meta and self._device.type != "meta" and id(tensor) not in self._paths

    def _is_of_graph(self, values: tuple[Any, ...]) -> bool:
        return any(
            isinstance(value, torch.Tensor) and (self.lineage.get(value) is not None or id(value) in self._paths)
            for value in values
        )

    def _is_named(self, origin: Origin) -> bool:
        while isinstance(origin, Part):
            origin = origin.owner
        return origin in self._named

    # -- what is asked of a tensor -----------------------------------------------------------------------------------

    def _attribute(self, name: str, function: Callable[..., Any], tensor: torch.Tensor) -> Any:
        if name == "device":
            return self._device_of(tensor, function)
        if name in ("is_cuda", "is_cpu") and not self.is_real:
            value: Any = self._device.type == name[3:]
        elif name == "is_meta" and not self.is_real:
            value = self._device.type == "meta"
        else:
            value = self.execute(function, (tensor,), {}) if name in _TENSOR_ATTRIBUTES else function(tensor)
        if self.whole or name in ("ndim", "grad", "grad_fn", "is_leaf", "_version", "_base", "is_meta"):
            return value
        if isinstance(value, torch.Tensor):
            node = self.add_node("call_function", getattr, (self.create_arg(tensor), name), {}, None, None)
            return self.follow(value, node, None)
        is_input = self._is_followed((tensor,)) and id(tensor) not in self._paths
        if name == "shape":
            return self._shape(value, tensor) if is_input else self._known_shape(value, tensor)
        if is_input or (name == "dtype" and self._is_of_graph((tensor,))):
            self._decide_attribute(tensor, name, value)
        return value

    def _shape(self, shape: torch.Size, tensor: torch.Tensor) -> torch.Size:
        frame = self._user_frame()
        node = self.add_node("call_function", getattr, (self.create_arg(tensor), "shape"), {}, None, frame)
        return self.follow(shape, node, frame)

    def _known_shape(self, shape: torch.Size, tensor: torch.Tensor) -> torch.Size:
        # The shape of a parameter is a plain value here and a node in a symbolic trace, which counts in names.
        if isinstance(tensor, nn.Parameter):
            self.names.skip(self.scope.module_path, "getattr")
            frame = self._user_frame()
            for step in what_follows(frame) if frame else ():
                times = int(step[7:]) if isinstance(step, str) and step.startswith("unpack") else 1
                for _ in range(times if step != "compare" else 0):
                    self.names.skip(self.scope.module_path, "getitem")
        return shape

    def _decide_attribute(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        if name == "requires_grad" or isinstance(value, (torch.Tensor, type(None))):
            return
        owner = self.create_arg(tensor)
        key = f"{cast(Node, owner).name}.{name}"
        if key not in self._attributes:
            node = self._create_plain_node("call_function", getattr, (owner, name), {}, None)
            self._attributes[key] = node
            self._guard(node, value, f"'{name}' of a tensor")

    def _device_of(self, tensor: torch.Tensor, function: Callable[..., Any]) -> torch.device:
        is_stand_in = tensor.is_meta and not self.is_real
        known = self._device if is_stand_in else function(tensor)
        if self.whole:
            return known
        # A new object at each read, so that it can be told which tensor's device is passed on.
        device = torch.device(known.type, known.index) if known.index is not None else torch.device(known.type)
        if self._is_followed((tensor,)) or id(tensor) in self._paths:
            owner = self.create_arg(tensor)
            self.lineage.put(device, Part(cast(Node, owner), getattr, "device"))
            frame = self._user_frame()
            if frame is not None and set(what_follows(frame)) & {"attribute type", "attribute index", "compare"}:
                self._decide_device(cast(Node, owner), known)
        return device

    def _decide_device(self, owner: Node, known: torch.device) -> None:
        key = f"{owner.name}.device.type"
        if key not in self._attributes:
            device = self._create_plain_node("call_function", getattr, (owner, "device"), {}, None)
            kind = self._attributes[key] = self._create_plain_node("call_function", getattr, (device, "type"), {}, None)
            self._guard(kind, known.type, "the type of a tensor's device")

    def _read_value(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if not self._is_of_graph(args):
            return function(*args, **kwargs)
        if name in ("numpy", "__array__"):
            raise Unfollowable("a tensor is turned into a numpy array")
        result = self.execute(function, args, kwargs)
        if name in ("item", "tolist"):
            frame = self._user_frame()
            arguments = tuple([self.create_arg(value) for value in args])
            node = self.add_node("call_method", name, arguments, {}, None, frame)
            if name == "tolist":
                self._check_form(node, result, "what tolist() gives")
            return self.follow(result, node, frame)
        called: dict[str, Callable[..., Any]] = {
            "__bool__": bool, "__int__": int, "__float__": float, "__complex__": complex,
            "__index__": operator.index, "__contains__": operator.contains,
        }  # fmt: skip
        return self._pinned(called.get(name, function), args, result)

    def _pinned(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """Record what Python got as a plain value, and that it must be the same again."""
        if self._is_of_graph(args):
            arguments = tuple([self.create_arg(value) for value in args])
            node = self._create_plain_node("call_function", function, arguments, {}, None)
            self._guard(node, result, f"{function.__name__}()")
        return result

    # -- results -----------------------------------------------------------------------------------------------------

    def follow(self, value: Any, origin: Origin, frame: FrameType | None) -> Any:
        """Return the value of `origin` so that whatever is done with it, or with a part of it, is followed."""
        if isinstance(value, torch.Tensor):
            self.lineage.put(value, origin)
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
            return traced_number(plain_number(value), origin, self)
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
        self.saw_sizes = True
        parts = [Part(origin, operator.getitem, index) for index in range(len(size))]
        numbers = [traced_number(plain_number(n), part, self) for n, part in zip(size, parts, strict=True)]
        followed = torch.Size(numbers)
        self.lineage.put(followed, origin)
        if frame is not None:
            steps = what_follows(frame)
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

    def _describe(self, node: Node, tensor: torch.Tensor) -> None:
        meta = node.meta
        meta["shape"], meta["dtype"] = tensor.shape, tensor.dtype
        if not tensor.is_inference():
            self.versions.append((node, tensor, tensor._version))

    # -- the trace of numbers ----------------------------------------------------------------------------------------

    def is_recording(self) -> bool:
        """Say whether what the running code does with numbers is recorded."""
        return self.is_active and not self.whole

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """Record arithmetic on traced numbers."""
        if not isinstance(result, (int, float)):
            return result
        self.did_modulo = self.did_modulo or function in _LOSSY
        node = self.add_node(
            "call_function", function, tuple([self.create_arg(value) for value in args]), {}, None, None
        )
        return traced_number(result, node, self)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...], result: bool) -> None:
        """Record that Python saw a relation between numbers to hold, or not to."""
        arguments = tuple([self.create_arg(value) for value in args])
        node = self.add_node("call_function", function, arguments, {}, None, None)
        self._guard(node, result, f"{arguments[0]} {function.__name__} {arguments[1]}")

    def _check_form(self, node: Node, value: Any, what: str) -> None:
        check = self._create_plain_node("call_function", check_form, (node, form_of(value), what), {})
        check.meta["is_guard"] = True

    def _guard(self, node: Node, value: Any, what: str) -> None:
        frame = user_frame()
        where = f" {describe(frame)}" if frame is not None else ""
        check = self._create_plain_node("call_function", check_decision, (node, value, f"{what}{where}"), {}, None)
        check.meta["is_guard"] = True

    # -- nodes -------------------------------------------------------------------------------------------------------

    def node_of(self, origin: Origin) -> Node:
        """Return the node of an origin, made now where it is a part that nobody has used yet."""
        if isinstance(origin, Node):
            return origin
        node = origin.node
        if node is None or node.is_erased:
            owner = self.node_of(origin.owner)
            if self._is_named(owner):
                node = self.add_node("call_function", origin.function, (owner, origin.key), {}, None, None)
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
        self._named.add(node)
        self.names.add(node, self.scope.module_path if op != "call_module" else cast(str, target), stem)
        if self._keep_source:
            frame = frame or user_frame()
            if frame is not None:
                node.meta["source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return node

    def _create_plain_node(
        self, op: str, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument], name: str | None = None
    ) -> Node:
        self._autocast_modes.follow()
        if torch.is_inference_mode_enabled():
            raise Unfollowable("forward enters torch.inference_mode")
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
        return self.node_of(origin) if origin is not None else super().create_other_arg(a)

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the path of a module in the root."""
        raise NotImplementedError

    def _tensor(self, tensor: torch.Tensor) -> Argument:
        origin = self.lineage.get(tensor)
        if origin is not None:
            return self.node_of(origin)
        path = self._paths.get(id(tensor))
        if path is None:
            if isinstance(tensor, nn.Parameter):
                raise Unfollowable(f"a parameter of shape {tuple(tensor.shape)} that the model does not own is used")
            if self._is_unseen(tensor):
                raise Unfollowable("a tensor is used that was made where the trace does not see it")
            return tensor
        node = self._attributes.get(path)
        if node is None or node.is_erased:
            if isinstance(tensor, nn.Parameter):
                node = self.add_node("get_attr", path, (), {}, None, None)
            else:
                node = self._create_plain_node("get_attr", path, (), {})
            self._attributes[path] = node
            self._describe(node, tensor if self.is_real else self.stand_ins.of(tensor))
        return node


_LOSSY = (operator.mod, operator.and_, operator.rshift, operator.floordiv)
_TENSOR_ATTRIBUTES = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})


def _as_written(
    function: Callable[..., Any], args: tuple[Argument, ...], kwargs: dict[str, Argument], frame: FrameType | None
) -> tuple[str, Target, tuple[Argument, ...], str | None]:
    """Return opcode, target, arguments and name for a torch call, as the model writes it: an operator, a method..."""
    name = function.__name__
    if not kwargs and len(args) > 1:
        known = OPERATORS.get(name)
        if known is not None and frame is not None and written_operator(frame) == known[0]:
            symbol, target = known
            # `x += y` is named as in a symbolic trace.
            return "call_function", target, args, target.__name__[1:] if symbol.endswith("=") else None
        reflected = REFLECTED.get(name)
        if reflected is not None:
            return "call_function", reflected, args[::-1], None
    magic = MAGIC.get(name)
    if magic is not None:
        return "call_function", magic, args, None
    if getattr(torch.Tensor, name, None) is function:
        return "call_method", name, args, None
    return "call_function", function, args, None


def another_name(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as another object, for a call that returns what it got, or for another input does not."""
    with torch._C.DisableTorchFunction():
        return torch.ops.aten.alias.default(tensor)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in cast(list[Any], value))
