"""Recording: turn the torch calls that really run into nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import FrameType, MethodDescriptorType
from typing import Any, cast

import torch
from torch import nn

from featx.ir.arguments import Argument
from featx.ir.node import Node, Target
from featx.ir.operator_effects import draws_now, operator_draws, operator_writes
from featx.tracing.environment.generators import TorchGenerator
from featx.tracing.environment.other_threads import is_only_thread
from featx.tracing.environment.switches import name_of_difference, switches
from featx.tracing.example.following import Following
from featx.tracing.example.lineage import Part
from featx.tracing.guards.scalars import Diverged, plain_numbers
from featx.tracing.operators import COMPARISONS, MAGIC, OPERATORS, READS_VALUES, REFLECTED, UNARY
from featx.tracing.signals import LeftBehind, Unfollowable
from featx.tracing.source.frames import (
    compares_objects,
    is_comparison,
    is_in_try,
    line_of,
    user_frame,
    what_follows,
    written_operator,
    written_sign,
)
from featx.tracing.symbolic.constants import memory_of, versions_of
from featx.tree import tree_leaves


class NeedsValues(BaseException):
    """The model asks for a value, which stand-ins have not."""


# What makes a text of a tensor.
_TEXT = ("__repr__", "__str__", "__format__")


class Recording(Following):
    """The state of one trace on an example, and what it does with each torch call."""

    generator: TorchGenerator

    # -- torch calls -------------------------------------------------------------------------------------------------

    def on_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch call: run it and, outside modules that are kept whole, record it."""
        result = self._answer(function, args, kwargs)
        if self.call_record is not None and not self.whole:
            self.call_record.note(function, args, kwargs, result)
        return result

    def _answer(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        if name == "__get__":
            if not self.whole:
                self.refuse_earlier(args[0])
            return self._attribute(cast(Any, function).__self__.__name__, function, args[0])
        if self.whole:
            return self.execute(function, args, kwargs)
        self.refuse_earlier(args, kwargs)
        # Tensor.set_, and what it assigns itself: torch loses an error that is raised here.
        if name == "set_" or (name == "__set__" and _is_of_backward_hooks(function) and args[1] is None):
            self.gave_memory = self.gave_memory or name == "set_"
            return function(*args, **kwargs)
        self.check_unseen()
        if function is torch._C._set_grad_enabled:
            self._grad_modes.record(args[0])
            self._grad_modes.is_enabled = args[0]
            return function(*args)
        if name == "__set__":
            raise Unfollowable(f"'{cast(Any, function).__self__.__name__}' of a tensor is assigned")
        if name in _MEMORY and self._is_of_graph(args):
            raise Unfollowable(f"the memory of a tensor is read past torch ({name})")
        if name in ("resize_", "resize_as_"):
            raise Unfollowable(f"a tensor gets other memory ({name})")
        if name in _RESHAPES and memory_of(args[0]) in self._renamed:
            raise Unfollowable(f"a tensor that other values may be too changes its shape in place ({name})")
        if name in ("dim", "ndimension"):
            return function(*args, **kwargs)
        if name in READS_VALUES:
            return self._read_value(name, function, args, kwargs)
        if name == "__len__":
            self.on_conversion()
            return self._pinned(len, args, function(*args))
        if name == "element_size" and self._is_of_graph(args):
            self._decide_dtype(args[0])
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
        if not self.is_real and torch._C._is_any_autocast_enabled():
            raise NeedsValues  # the meta device does not know of autocast
        if self.whole:  # of a node of its own the graph knows
            self.drew = self.drew or draws_now(name, args, kwargs)
            if operator_writes(name) or "out" in kwargs:
                self.save_globals((*args[:1], kwargs.get("out")))
            if operator_writes(name) or "out" in kwargs or kwargs.get("inplace"):
                self.written_at.add(line_of(user_frame()))
        if self.stand_ins.writes_model(function, args, kwargs):
            self.wrote_model = True
        if self.is_real:
            if self.expected_numbers is not None:
                args, kwargs = plain_numbers((args, kwargs))
            result = function(*args, **kwargs)
            if name in READS_VALUES:
                self.answers.append((name, result))
            return result
        if name in _MEMORY and any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            raise NeedsValues  # of a stand-in it would be 0
        if name in READS_VALUES:
            is_unknown = any(isinstance(value, torch.Tensor) and value.is_meta for value in args)
            if is_unknown or self.expected_answers:
                answer = self._earlier_answer(name)
                if is_unknown:
                    return answer
        result = self.stand_ins.run(function, args, kwargs)
        if name == "type" and isinstance(result, str):
            return result.replace(
                "torch.meta.", "torch." if self._device.type == "cpu" else f"torch.{self._device.type}."
            )
        return result

    def _earlier_answer(self, name: str) -> Any:
        # The graph will check that what it read is what was read for real.
        if not self.expected_answers:
            raise NeedsValues
        asked, answer = self.expected_answers.popleft()
        if asked != name:
            raise Diverged
        return answer

    def save_globals(self, tensors: Iterable[Any]) -> None:
        """Take note that tensors are about to be written inside a module that is kept whole."""
        raise NotImplementedError

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call, make a node of it, and return its result as a followed value."""
        frame = self.model_frame()
        if frame is not None:
            self.codes.add(frame.f_code)
        if switches() != self._switches:
            name = name_of_difference(self._switches)
            raise Unfollowable(f"forward sets a switch of torch for the whole process: {name},")
        if frame is not None and is_in_try(frame):
            raise Unfollowable("a torch call stands in a `try` that catches errors, which may come for other inputs")
        arguments = tuple([self.create_arg(value) for value in args])
        keywords = {key: self.create_arg(value) for key, value in kwargs.items()} if kwargs else {}
        name = function.__name__
        result = self._executed(function, args, kwargs)
        if args and result is args[0] and isinstance(result, torch.Tensor) and not operator_writes(name):
            result = self.another_name(result, frame)
        op, target, arguments, stem = _as_written(function, arguments, keywords, frame)
        result = self.follow(result, self.add_node(op, target, arguments, keywords, stem, frame), frame)
        if name in ("squeeze", "squeeze_"):
            # How many dimensions go depends on sizes.
            self._pinned(torch.Tensor.dim, (result,), result.dim())
        return result

    def _executed(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The numbers that a graph draws follow from the state of the generator, which it must find as the model does.
        name = function.__name__
        is_draw = self._draws.get(name)
        if is_draw is None:
            is_draw = self._draws[name] = operator_draws(name)
        if is_draw:
            self.check_generator()
        result = self.execute(function, args, kwargs)
        if is_draw:
            self.note_draw()
        return result

    def note_draw(self) -> None:
        """Remember the state in which the next draw should find torch's generator."""
        if is_only_thread():  # a trace draws nothing from this generator but here, so that the state tells
            with torch._C.DisableTorchFunction():
                torch.empty(1, device="cpu").uniform_()
        self.generator.note()

    def check_generator(self) -> None:
        """Raise where forward has put torch's generator into another state than that of the last draw."""
        if self.generator.was_set():
            raise LeftBehind("forward seeds torch's random generator, or puts it back,")

    def another_name(self, tensor: torch.Tensor, frame: FrameType | None) -> torch.Tensor:
        """Return the same memory as another object, for a call that returns what it got, or for another input does not.

        Raises:
            Unfollowable: the code of `frame` would notice.
        """
        if frame is not None and compares_objects(frame.f_code):
            raise Unfollowable("forward may ask with `is` whether a call returns what it got")
        if tensor.layout != torch.strided:
            raise Unfollowable("a call returns the sparse tensor that it got")
        self._renamed.add(memory_of(tensor))
        with torch._C.DisableTorchFunction():
            return torch.ops.aten.alias.default(tensor)

    def _on_constants(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # No input of the model is involved. A call that makes or writes tensors is recorded, without a name, as they
        # may be written later and must be made anew in each call; what any other gives is a plain value.
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = versions_of(given)
        result = self._executed(function, args, kwargs)
        is_written = operator_writes(function.__name__) or "out" in kwargs or versions_of(given) != versions
        if not is_written and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            return result
        arguments = tuple([self.create_arg(value) for value in args])
        keywords = {key: self.create_arg(value) for key, value in kwargs.items()} if kwargs else {}
        frame = self.model_frame()
        op, target, arguments, stem = _as_written(function, arguments, keywords, frame)
        return self.follow(result, self._create_plain_node(op, target, arguments, keywords, stem), frame)

    # -- what is asked of a tensor -----------------------------------------------------------------------------------

    def _attribute(self, name: str, function: Callable[..., Any], tensor: torch.Tensor) -> Any:
        if name == "data":  # whatever is written through it does not count as a version
            self.uncounted.add(memory_of(tensor))
            self.wrote_unseen = self.wrote_unseen or bool(self.whole)
        if name == "device":
            return self._device_of(tensor, function)
        if name in ("is_cuda", "is_cpu") and not self.is_real:
            value: Any = self._device.type == name[3:]
        elif name == "is_meta" and not self.is_real:
            value = self._device.type == "meta"
        else:
            value = self.execute(function, (tensor,), {}) if name in _TENSOR_ATTRIBUTES else function(tensor)
            if name in _OF_DTYPE and self.stand_ins.is_cast:
                value = function(self.stand_ins.of(tensor))
        if name in _ABOUT_GRADIENTS and not self.whole:
            if self.is_real:
                self.answers.append((name, value))
            elif tensor.is_meta or self.expected_answers:  # stand-ins do not know
                value = self._earlier_answer(name)
        if self.whole or name in ("ndim", "grad", "_version", "_base", "is_meta"):
            return value
        if isinstance(value, torch.Tensor):
            node = self.add_node("call_function", getattr, (self.create_arg(tensor), name), {}, None, None)
            return self.follow(value, node, None)
        is_input = self._is_followed((tensor,)) and id(tensor) not in self._paths
        if name == "shape":
            return self._shape(value, tensor) if is_input else self._known_shape(value, tensor)
        if name in _OF_DTYPE and self._is_of_graph((tensor,)):
            self._decide_dtype(tensor)
        if is_input or (name in _OF_DTYPE and self._is_of_graph((tensor,))):
            self._decide_attribute(tensor, name, value)
        return value

    def _decide_dtype(self, tensor: torch.Tensor) -> None:
        self._decide_attribute(tensor, "dtype", self.stand_ins.dtype_of(tensor))

    def _shape(self, shape: torch.Size, tensor: torch.Tensor) -> torch.Size:
        frame = self.model_frame()
        node = self.add_node("call_function", getattr, (self.create_arg(tensor), "shape"), {}, None, frame)
        return self.follow(shape, node, frame)

    def _known_shape(self, shape: torch.Size, tensor: torch.Tensor) -> torch.Size:
        # The shape of a parameter is a plain value here and a node in a symbolic trace, which counts in names.
        if isinstance(tensor, nn.Parameter):
            self.names.skip(self.scope.module_path, "getattr")
            frame = self.model_frame()
            for step in what_follows(frame) if frame else ():
                times = int(step[7:]) if isinstance(step, str) and step.startswith("unpack") else 1
                for _ in range(times if step != "compare" else 0):
                    self.names.skip(self.scope.module_path, "getitem")
        return shape

    def _decide_attribute(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            return
        if name == "grad_fn" and value is not None:
            raise Unfollowable("the history of a tensor (grad_fn) is read")
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
            frame = self.model_frame()
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
        if name in _TEXT and self.is_message():
            return function(*args, **kwargs) if self.is_real else repr(args[0])  # with "..." for the values
        result = self.execute(function, args, kwargs)
        if name in ("item", "tolist"):
            frame = self.model_frame()
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
            # TorchScript knows `x.dim()` and not `torch.Tensor.dim(x)`.
            is_method = isinstance(function, MethodDescriptorType)
            op, target = ("call_method", function.__name__) if is_method else ("call_function", function)
            node = self._create_plain_node(op, target, arguments, {}, None)
            self._guard(node, result, f"{function.__name__}()")
        return result


# What changes the shape of a tensor and of all that are the same object.
_RESHAPES = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_"})
_ABOUT_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn"})
_OF_DTYPE = frozenset({"dtype", "itemsize", "nbytes"})
_MEMORY = frozenset({"untyped_storage", "storage", "_typed_storage", "__dlpack__", "data_ptr"})
_TENSOR_ATTRIBUTES = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})


def _is_of_backward_hooks(function: Any) -> bool:
    return function.__self__.__name__ == "_backward_hooks"


def _as_written(
    function: Callable[..., Any], args: tuple[Argument, ...], kwargs: dict[str, Argument], frame: FrameType | None
) -> tuple[str, Target, tuple[Argument, ...], str | None]:
    """Return opcode, target, arguments and name for a torch call, as the model writes it: an operator, a method..."""
    name = function.__name__
    if not kwargs and len(args) == 1 and name in UNARY and frame is not None:
        sign, target = UNARY[name]
        if written_sign(frame) == sign:
            return "call_function", target, args, None
    if not kwargs and len(args) > 1:
        if name in COMPARISONS and frame is not None and is_comparison(frame):
            return "call_function", COMPARISONS[name], args, None
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
