"""Proxy: a stand-in for a value of the model, which records what is done with it."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.errors import ControlFlowError, TraceError
from featx.ir.names import name_of_target
from featx.tracing.nodes.value_types import value_type_of
from featx.tracing.source.frames import describe, is_library_code, user_frame
from featx.tracing.source_uses.syntax_queries import (
    asks_for_attribute,
    is_assertion,
    is_type_question,
    unpacked_count,
    writes_a_message,
)

if TYPE_CHECKING:
    from featx.ir.node import Node
    from featx.tracing.nodes.tracer_base import TracerBase

# The operators that a proxy records as functions of the module operator.
_BINARY = ["add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor", "matmul"]
_COMPARISONS = ["eq", "ne", "lt", "gt", "le", "ge"]
_SETTABLE_OF_TENSORS = frozenset({"data", "grad", "requires_grad", "names", "real", "imag"})
_UNARY = ["neg", "pos", "invert", "abs"]


class Proxy:
    """Stands for the value of `node` and records torch functions, methods and operators that touch it.

    Wrap a node of your own graph, `Proxy(node)`, to append to that graph by writing ordinary torch code.
    """

    tracer: TracerBase
    node: Node

    def __init__(self, node: Node, tracer: TracerBase | None = None) -> None:
        if tracer is None:
            from featx.tracing.nodes.tracer_base import GraphAppendingTracer

            tracer = GraphAppendingTracer(node.graph)
        state = self.__dict__  # past __setattr__, which is slower
        state["tracer"] = tracer
        state["node"] = node

    def __repr__(self) -> str:
        if self.tracer.refuses_questions:
            frame = sys._getframe(1)
            if not is_library_code(frame.f_code) and not writes_a_message(frame):
                raise _refusal(self, "a traced value is made into a text")
        return f"Proxy({self.node.name})"

    def __hash__(self) -> int:
        if self.tracer.refuses_questions and not is_library_code(sys._getframe(1).f_code):
            raise _refusal(self, "a traced value is looked up in a dict or set")
        return object.__hash__(self)

    def __getattr__(self, name: str) -> Attribute:
        if self.tracer.refuses_questions and asks_for_attribute(sys._getframe(1)):
            raise _refusal(self, f"a traced value is asked whether it has an attribute '{name}'")
        if name.startswith("__") and name.endswith("__"):
            # Python's protocols are asked for on the type; an instance that claimed them would mislead copy and numpy.
            raise AttributeError(f"a traced value has no attribute '{name}'")
        if name == "_as_parameter_":  # ctypes would ask what this returns for it again, until the stack overflows
            raise _refusal(self, "a traced value is passed to a function of ctypes")
        return Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTABLE_OF_TENSORS:
            raise _refusal(self, f"'{name}' of a traced value is assigned", "write with value.copy_(...), or detach it")
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - magic
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __iter__(self) -> Iterator[Any]:
        count = unpacked_count(sys._getframe(1))
        if count is not None:
            return iter([self[index] for index in range(count)])
        return self.tracer.iter(self)

    def keys(self) -> Any:
        """Record, or refuse, the `**` of this value; see `TracerBase.keys`."""
        return self.tracer.keys(self)

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        if self.tracer.trace_asserts and is_assertion(frame):
            self.tracer.create_proxy("call_function", torch._assert, (self, "assertion failed in the traced model"), {})
            return True
        return self.tracer.to_bool(self)

    def __len__(self) -> int:
        what = "len() of a traced value: 'len' is not supported in symbolic tracing by default,"
        raise _refusal(self, what, "use value.shape[0], or record the call with featx.wrap('len')")

    def __index__(self) -> int:
        # torch's argument parser tries this too and does without, so it is no refusal to remember.
        what = (
            f"Python needs a traced value as a plain integer: a range, a slice, a list index (Proxy '{self.node.name}')"
        )
        raise refusal(self.tracer, ControlFlowError, what)

    def __int__(self) -> int:
        raise _refusal(self, "int() of a traced value")

    def __float__(self) -> float:
        raise _refusal(self, "float() of a traced value")

    def __contains__(self, item: object) -> bool:
        raise _refusal(self, "a traced value is searched with `in`")

    def __round__(self, digits: int | None = None) -> Any:
        return self._record(round, *(() if digits is None else (digits,)))

    def __ceil__(self) -> Any:
        return self._record(math.ceil)

    def __floor__(self) -> Any:
        return self._record(math.floor)

    def __trunc__(self) -> Any:
        return self._record(math.trunc)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def _record(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # isinstance(proxy, torch.Tensor) lands here, and so does much else that must not be answered (torch's argument
        # parser would take a proxy for a tensor and read memory that is not one), so the calling code is looked at.
        frame = sys._getframe(1)
        if not is_type_question(frame) or _is_called_by(self.tracer, frame):
            return type(self)
        kind = value_type_of(self.node, getattr(self.tracer, "root", None))
        if kind is None:
            raise _refusal(self, "isinstance() of a traced value whose type is not known")
        return kind

    @property
    def _is_param(self) -> bool:
        # isinstance(x, nn.Parameter) asks for this.
        return value_type_of(self.node, getattr(self.tracer, "root", None)) is torch.nn.Parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        return type(self)(memo.get(id(self.node), self.node), self.tracer)

    @classmethod
    def __torch_function__(
        cls,
        orig_method: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = args or (), kwargs or {}
        proxy = find_proxy(args)
        if proxy is None:
            proxy = find_proxy(kwargs)
        if proxy is None:
            return NotImplemented
        return _record_torch_call(proxy.tracer, orig_method, args, kwargs)


def _is_called_by(tracer: TracerBase, frame: FrameType | None) -> bool:
    """Say whether a method of the tracer asks, or code that it calls, rather than the code that is traced."""
    while frame is not None and is_library_code(frame.f_code):  # `isinstance(x, nn.Parameter)` is code of torch
        frame = frame.f_back
    while frame is not None and not is_library_code(frame.f_code):
        first = frame.f_code.co_varnames[:1]
        if first and frame.f_locals.get(first[0]) is tracer:
            return True
        frame = frame.f_back
    return False


class Attribute(Proxy):
    """An attribute of a traced value; recorded as a method call if it is called, as `getattr` if it is used."""

    def __init__(self, root: Proxy, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: Node | None = None

    @property
    def node(self) -> Node:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The `getattr` node, made at the first use."""
        node = self._node
        if node is None:
            node = self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - magic
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        return Proxy(self.node, self.tracer)


class ParameterProxy(Proxy):
    """A parameter whose shape is known: `shape`, `size`, `dim`, `ndim` and `numel` are plain values."""

    def __init__(self, tracer: TracerBase, node: Node, name: str, param: torch.nn.Parameter) -> None:
        super().__init__(node, tracer)
        self.param = param
        self.name = name

    def __repr__(self) -> str:
        return f"ParameterProxy({self.name})"

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return self.param.shape

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the parameter, or its length along `dim`."""
        return self.param.size() if dim is None else self.param.size(dim)

    def dim(self) -> int:
        """Return the number of dimensions of the parameter."""
        return self.param.dim()

    @property
    def ndim(self) -> int:
        """The number of dimensions of the parameter."""
        return self.param.ndim

    def numel(self) -> int:
        """Return the number of elements of the parameter."""
        return self.param.numel()

    def nelement(self) -> int:
        """Return the number of elements of the parameter."""
        return self.param.nelement()


def _record_torch_call(
    tracer: TracerBase, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call that reached `__torch_function__`: methods by name, functions by object."""
    if type(function) is torch._C.ScriptMethod:
        method = cast(Any, function)
        return tracer.create_proxy("call_method", method.name, (method.owner, *args), kwargs)
    name = function.__name__
    if name == "__get__":
        return tracer.create_proxy("call_function", getattr, (args[0], cast(Any, function).__self__.__name__), {})
    if getattr(torch.Tensor, name, None) is function:
        return tracer.create_proxy("call_method", name, args, kwargs)
    return tracer.create_proxy("call_function", function, args, kwargs, name=name_of_target(name))


def find_proxy(value: Any) -> Proxy | None:
    """Return the first proxy inside nested tuples, lists, dicts and slices, or None."""
    kind = type(value)  # isinstance() on a proxy of a known kind would ask for its __class__
    if issubclass(kind, (tuple, list)):
        for item in value:
            found = item if type(item) is Proxy else find_proxy(item)
            if found is not None:
                return found
        return None
    if issubclass(kind, Proxy):
        return value
    if issubclass(kind, dict):
        return find_proxy(list(value.values()))
    return find_proxy((value.start, value.stop, value.step)) if kind is slice else None


def _refusal(proxy: Proxy, what: str, advice: str | None = None) -> TraceError:
    error = refusal(proxy.tracer, ControlFlowError, f"{what} (Proxy '{proxy.node.name}')", advice)
    # A model that catches TypeError or ValueError must not swallow it and go another way.
    proxy.tracer.refused = proxy.tracer.refused or error
    return error


_ADVICE = (
    "trace with an example, featx.trace(model, example), make that module a leaf (is_leaf_module or leaf_modules), put "
    "the code into a function and featx.wrap it, or fix the input that decides it with concrete_args"
)


def failure(tracer: TracerBase, error: Exception) -> TraceError:
    """Build the error for a call that does not take proxies, from what it raised."""
    frame, traceback = None, error.__traceback__
    while traceback is not None:
        if not is_library_code(traceback.tb_frame.f_code):
            frame = traceback.tb_frame
        traceback = traceback.tb_next
    what = f"a traced value is passed to code that needs a tensor ({type(error).__name__}: {error})"
    return ControlFlowError(f"cannot trace {tracer.where()}: {what} {describe(frame)}. To go on, {_ADVICE}.")


def refusal(tracer: TracerBase, kind: type[TraceError], what: str, advice: str | None = None) -> TraceError:
    """Build the error for something that a symbolic trace cannot do, with its place in the model and a way out."""
    module = tracer.where()
    return kind(f"cannot trace {module}: {what} {describe(user_frame())}. To go on, {advice or _ADVICE}.")


def _define_operator(method: str, target: Callable[..., Any], name: str | None = None) -> None:
    def implementation(self: Proxy, *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, *args), {}, name)

    setattr(Proxy, method, implementation)


def _define_reflected(method: str, target: Callable[..., Any]) -> None:
    def implementation(self: Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (other, self), {})

    setattr(Proxy, method, implementation)


for _name in (*_BINARY, *_COMPARISONS, *_UNARY):
    _define_operator(f"__{_name.strip('_')}__", getattr(operator, _name))
for _name in _BINARY:
    _bare = _name.strip("_")
    _define_reflected(f"__r{_bare}__", getattr(operator, _name))
    # `x += y` writes into a tensor. It is named as torch.fx names it, which records an addition in its place.
    _define_operator(f"__i{_bare}__", getattr(operator, f"i{_bare}"), name=_bare)
