"""What a model asks of a tensor: attributes, its shape and device, and values as numbers of Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FrameType, MethodDescriptorType
from typing import Any, cast

import torch
from torch import nn

from featx.ir.memory import memory_of
from featx.ir.node import Node
from featx.ir.operator_facts import VIEW_ATTRIBUTES
from featx.libraries import reads_no_values_when_compiled
from featx.tracing.calls.value_log import ValueLog
from featx.tracing.history.lineage import Part
from featx.tracing.recording.numbers import READS_NUMBERS
from featx.tracing.recording.recorder import Recorder
from featx.tracing.recording.results import Results
from featx.tracing.side_effects.forward_side_effects import depends_on_inputs
from featx.tracing.signals import Untraceable
from featx.tracing.source_uses.syntax_queries import AttributeRead, Comparing, Unpacking, what_follows

Execute = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
MakeAlias = Callable[[torch.Tensor, FrameType | None], torch.Tensor]

# What makes a text of a tensor.
_TEXT = ("__repr__", "__str__", "__format__")
ABOUT_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn"})
_OF_DTYPE = frozenset({"dtype", "itemsize", "nbytes"})
# Steps by which code asks for the kind of a device.
_ASKING_KIND = (AttributeRead("type"), AttributeRead("index"), Comparing())
_OF_SIZES = frozenset({"shape", "ndim", "nbytes"})
# What is checked for parameters too.
_DECIDED_OF_ALL = _OF_DTYPE | {"requires_grad"}
_SAME_IN_EACH_CALL = frozenset({"ndim", "grad", "_version", "_base", "is_meta"})
_CONVERSIONS: dict[str, Callable[..., Any]] = {
    "__bool__": bool, "__int__": int, "__float__": float, "__complex__": complex,
    "__index__": operator.index, "__contains__": operator.contains,
}  # fmt: skip


class TensorReads:
    """Answers what the model asks of tensors, and records what it depends on.

    Args:
        recorder: makes the nodes.
        results: follows tensors and numbers that are answers.
        value_log: what a trace for real was answered.
        execute: runs a torch call on stand-ins, or for real.
        make_alias: makes another object of the memory of a tensor.
    """

    def __init__(
        self, recorder: Recorder, results: Results, value_log: ValueLog, execute: Execute, make_alias: MakeAlias
    ) -> None:
        self._recorder = recorder
        self._results = results
        self._value_log = value_log
        self._execute = execute
        self._make_alias = make_alias
        # The checks of attributes, by the name of the tensor's node and those of the attributes.
        self._checked: dict[tuple[str, ...], Node] = {}

    # -- attributes --------------------------------------------------------------------------------------------------

    def attribute(self, name: str, function: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """Answer the read of an attribute of a tensor. `function` reads it."""
        recorder, is_inside = self._recorder, self._recorder.opaque_call.is_inside
        if name == "data":  # whatever is written through it does not count as a version
            recorder.write_log.untracked_memory.add(memory_of(tensor))
            recorder.opaque_call.note_untracked_write()
        if name == "device":
            return self._device(tensor, function)
        value: Any = self._value(name, function, tensor)
        if name in ABOUT_GRADIENTS and not is_inside:
            if recorder.is_real:
                self._value_log.note(name, value)
            elif tensor.is_meta or self._value_log.are_expected:  # stand-ins do not know
                value = self._value_log.next(name)
        if name == "grad" and id(tensor) in recorder.owned and tensor.grad is not None:
            self._refuse_gradient()
        if is_inside:
            if name in _OF_SIZES:
                recorder.opaque_call.asks_for_sizes = True
            return value
        if name in _SAME_IN_EACH_CALL:
            if name == "ndim":
                self.note_rank(tensor)
            return value
        if isinstance(value, torch.Tensor):
            if value is tensor:  # `x.real` of a tensor that is not complex
                value = self._make_alias(tensor, recorder.model_frame())
            arguments = (recorder.create_arg(tensor), name)
            return self._results.follow(
                value, recorder.add_node("call_function", getattr, arguments, {}, None, None), None
            )
        is_input = recorder.is_followed((tensor,)) and id(tensor) not in recorder.owned
        if name == "shape":
            return self._shape(value, tensor) if is_input else self._known_shape(value, tensor)
        if name in _OF_DTYPE and recorder.is_of_graph((tensor,)):
            self.decide_dtype(tensor)
        if is_input or (name in _DECIDED_OF_ALL and recorder.is_of_graph((tensor,))):
            self._decide_attribute(tensor, name, value)
        return value

    def _value(self, name: str, function: Callable[..., Any], tensor: torch.Tensor) -> Any:
        recorder = self._recorder
        if not recorder.is_real:
            if name in ("is_cuda", "is_cpu"):
                return recorder.device.type == name[3:]
            if name == "is_meta":
                return recorder.device.type == "meta"
        if name in _OF_DTYPE and recorder.stand_ins.is_cast:
            return function(recorder.stand_ins.of(tensor))
        return self._execute(function, (tensor,), {}) if name in VIEW_ATTRIBUTES else function(tensor)

    def note_rank(self, tensor: torch.Tensor) -> None:
        """Note that the model sees how many dimensions a tensor has, which follows from those of the inputs."""
        recorder = self._recorder
        if id(tensor) not in recorder.owned and recorder.is_followed((tensor,)):
            recorder.numbers.shapes_were_read = True

    def _refuse_gradient(self) -> None:
        # It is a tensor of the model, which code that gets it may write.
        if not self._recorder.opaque_call.is_inside:
            raise Untraceable("the gradient of a parameter (grad) is read")
        self._recorder.require_own_parameters()

    def decide_dtype(self, tensor: torch.Tensor) -> None:
        """Record that the model depends on the dtype of a tensor."""
        self._decide_attribute(tensor, "dtype", self._recorder.stand_ins.dtype_of(tensor))

    def _shape(self, shape: torch.Size, tensor: torch.Tensor) -> torch.Size:
        recorder = self._recorder
        frame = recorder.model_frame()
        arguments = (recorder.create_arg(tensor), "shape")
        return self._results.follow(
            shape, recorder.add_node("call_function", getattr, arguments, {}, None, frame), frame
        )

    def _known_shape(self, shape: torch.Size, tensor: torch.Tensor) -> torch.Size:
        # The shape of a parameter is a plain value here and a node in a symbolic trace, which counts in names.
        if isinstance(tensor, nn.Parameter):
            names, path = self._recorder.names, self._recorder.scope.module_path
            names.skip(path, "getattr")
            frame = self._recorder.model_frame()
            for step in what_follows(frame) if frame else ():
                times = step.names if isinstance(step, Unpacking) else int(not isinstance(step, Comparing))
                for _ in range(times):
                    names.skip(path, "getitem")
        return shape

    def _decide_attribute(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            return
        if name == "grad_fn" and value is not None:
            raise Untraceable("forward reads the autograd graph of a tensor (grad_fn)")
        self._decide(cast(Node, self._recorder.create_arg(tensor)), (name,), value, f"'{name}' of a tensor")

    def _device(self, tensor: torch.Tensor, function: Callable[..., Any]) -> torch.device:
        recorder = self._recorder
        is_stand_in = tensor.is_meta and not recorder.is_real
        known = recorder.device if is_stand_in else function(tensor)
        if recorder.opaque_call.is_inside:
            return known
        # A new object at each read, so that it can be told which tensor's device is passed on.
        device = torch.device(known.type, known.index) if known.index is not None else torch.device(known.type)
        if recorder.is_followed((tensor,)) or id(tensor) in recorder.owned:
            owner = cast(Node, recorder.create_arg(tensor))
            recorder.lineage.put(device, Part(owner, getattr, "device"))
            frame = recorder.model_frame()
            if frame is not None and any(step in _ASKING_KIND for step in what_follows(frame)):
                self._decide(owner, ("device", "type"), known.type, "the type of a tensor's device")
        return device

    def _decide(self, owner: Node, attributes: tuple[str, ...], value: Any, what: str) -> None:
        """Record, once for each tensor, that an attribute of it, or of such a one, must be `value` again."""
        check = self._checked.get((owner.name, *attributes))
        if check is None or check.is_erased:
            node = owner
            for name in attributes:
                node = self._recorder.add_unnamed_node("call_function", getattr, (node, name), {}, None)
            self._checked[owner.name, *attributes] = self._recorder.guards.add(node, value, what)

    # -- values ------------------------------------------------------------------------------------------------------

    def read_value(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer a call that turns values into numbers, texts or truth values of Python."""
        recorder = self._recorder
        if not recorder.is_of_graph((*args, *kwargs.values())):
            return function(*args, **kwargs)
        if name in ("numpy", "__array__"):
            raise Untraceable("a tensor is turned into a numpy array")
        if name in _TEXT and recorder.numbers.is_message():
            return function(*args, **kwargs) if recorder.is_real else repr(args[0])  # with "..." for the values
        result = self._execute(function, args, kwargs)
        if name in READS_NUMBERS:
            frame = recorder.model_frame()
            node = recorder.add_node("call_method", name, recorder.create_args(args), {}, None, frame)
            if name == "tolist":
                recorder.guards.add_for_form(node, result, "what tolist() gives")
            return self._results.follow(result, node, frame)
        if name in ("__int__", "__float__"):
            recorder.numbers.on_conversion()
        return self.pinned(_CONVERSIONS.get(name, function), args, kwargs, result)

    def pinned(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Record what Python got as a plain value, and that it must be the same again."""
        recorder = self._recorder
        if recorder.is_of_graph((*args, *kwargs.values())):
            frame = recorder.model_frame()
            if function is bool and frame is not None and reads_no_values_when_compiled(frame):
                # No bool() for torch.export to stop at.
                asked = cast(Node, recorder.create_arg(args[0]))
                # Positions that follow from sizes are those of one text, which a mask for several leaves as it is.
                when_compiled = "no" if depends_on_inputs(asked) else "pass"
                recorder.guards.add(asked, result, "bool()", when_compiled=when_compiled)
                return result
            # TorchScript knows `x.dim()` and not `torch.Tensor.dim(x)`.
            is_method = isinstance(function, MethodDescriptorType)
            op, target = ("call_method", function.__name__) if is_method else ("call_function", function)
            node = recorder.add_unnamed_node(
                op, target, recorder.create_args(args), recorder.create_kwargs(kwargs), None
            )
            recorder.guards.add(node, result, f"{function.__name__}()")
        return result
