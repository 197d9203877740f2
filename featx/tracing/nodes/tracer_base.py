"""What all tracers share: turning calls and their arguments into nodes, and nodes into proxies."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from featx.errors import ControlFlowError, MutationError, TraceError, UnsupportedArgumentError
from featx.ir.arguments import Argument
from featx.ir.graph import Graph
from featx.ir.immutable import ImmutableDict
from featx.ir.node import Node, Target
from featx.ir.operator_facts import facts_of
from featx.rebuilding import attributes_of, rebuild_dict, rebuild_list, rebuild_object, rebuild_tuple
from featx.tracing.nodes.proxy import Proxy, refusal
from featx.tracing.objects.arrays import is_scalar_of_numpy

# Types that stand in a graph as they are, found by one lookup.
_LITERALS = frozenset(
    {
        int, float, bool, str, complex, bytes, type(None), type(Ellipsis), range,
        torch.dtype, torch.device, torch.layout, torch.memory_format, Node,
    }
)  # fmt: skip


class TracerBase:
    """Makes nodes of `graph` and proxies for them. Subclass `Tracer` to trace modules."""

    graph: Graph
    # Record `assert value` as a check in the graph instead of refusing it.
    trace_asserts: bool = True
    # Make proxies of buffers, as of parameters, when the model reads them.
    proxy_buffer_attributes: bool = False
    # Store the line of the model that made each node in its meta.
    record_stack_traces: bool = False
    # The first thing that was refused in this trace, which the model may have caught.
    refused: TraceError | None = None
    # Refuse calls of functions and methods that write their arguments.
    check_mutable_operations: bool = False
    # Refuse what a proxy cannot answer, and torch.fx answers by the proxy itself: its hash, its text, `hasattr`.
    refuses_questions: bool = False
    # Let texts of the graph say how to ask for a node whose name does not show it. Those of torch.fx say no such thing.
    shows_names: bool = False
    # The method of the root module that is traced.
    traced_func_name: str = "forward"

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Add a node to the graph; override to check or change what is recorded.

        Raises:
            MutationError: the call writes an argument, and `check_mutable_operations` is set.
        """
        if self.check_mutable_operations and kind in ("call_function", "call_method"):
            self._refuse_write(target, kwargs)
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)

    def _refuse_write(self, target: Target, kwargs: dict[str, Argument]) -> None:
        name = str(getattr(target, "__name__", target))
        if "out" in kwargs or facts_of(name).writes_first:
            what = (
                f"{name} is a mutable operation: it writes one of its arguments, and check_mutable_operations is set,"
            )
            raise refusal(self, MutationError, what, "compute a new value, or leave check_mutable_operations off")

    def proxy(self, node: Node) -> Proxy:
        """Return a proxy for `node`; override to use a proxy class of your own."""
        return Proxy(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Any:  # Any: a Proxy, which code that is traced takes for a tensor
        """Record a call with arguments as the model passes them, proxies among them; return a proxy of its result."""
        create_arg = self.create_arg
        arguments = tuple([create_arg(value) for value in args])
        keywords = create_arg(kwargs) if kwargs else {}
        node = self.create_node(kind, target, arguments, keywords, name, type_expr)
        return self.proxy(node) if proxy_factory_fn is None else proxy_factory_fn(node)

    def create_arg(self, a: Any) -> Argument:
        """Turn a value that the model passes into an argument of a node: proxies become nodes, at any depth.

        Raises:
            ArgumentTypeError: the value has a type that no graph can hold.
        """
        kind = type(a)
        if kind is Proxy:
            return a.node
        if kind in _LITERALS:
            return a
        if issubclass(kind, Proxy):
            return a.node
        if kind is tuple:
            return tuple([self.create_arg(item) for item in a])
        if kind is list:
            return [self.create_arg(item) for item in a]
        if kind is dict:
            return {self._key(key): self.create_arg(item) for key, item in a.items()}
        if kind is slice:
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        return self.create_other_arg(a)

    def create_other_arg(self, a: Any) -> Argument:
        """Turn a value that is neither a proxy nor a plain literal or container into an argument."""
        if hasattr(type(a), "__fx_create_arg__"):
            return a.__fx_create_arg__(self)
        if isinstance(a, tuple):
            items = [self.create_arg(item) for item in cast(tuple[Any, ...], a)]
            kind = type(cast(tuple[Any, ...], a))
            attributes = self._attributes_of(a)
            if attributes or _has_own_constructor(kind):
                given = (attributes,) if attributes else ()
                return self.create_node("call_function", rebuild_tuple, (kind, tuple(items), *given), {})
            return tuple.__new__(kind, items) if hasattr(a, "_fields") else kind(items)
        if isinstance(a, list):
            items = [self.create_arg(item) for item in cast(list[Any], a)]
            attributes = self._attributes_of(a)
            if not attributes:
                return items
            return self.create_node("call_function", rebuild_list, (type(cast(Any, a)), items, attributes), {})
        if isinstance(a, dict):
            return self._rebuild_in_graph(cast(dict[Any, Any], a))
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            attributes = self._attributes_of(a)
            if _only_assigns(type(a)) and attributes.keys() == {field.name for field in dataclasses.fields(a)}:
                return self.create_node("call_function", type(a), (), attributes)
            return self.create_node("call_function", rebuild_object, (type(a), attributes), {})
        if isinstance(a, (enum.Enum, int, float, str, torch.Tensor)) or callable(a):
            return a
        if is_scalar_of_numpy(a):  # numpy.int64(2), which torch takes as a number
            return a.item()
        raise UnsupportedArgumentError(
            f"a value of type {type(a).__name__} is passed to a traced call, and a graph cannot hold it; "
            "make the called module a leaf, wrap the function that uses it, or give the type an __fx_create_arg__"
        )

    def _attributes_of(self, value: object) -> dict[str, Argument]:
        return {name: self.create_arg(item) for name, item in attributes_of(value).items()}

    def _rebuild_in_graph(self, items: dict[Any, Any]) -> Argument:
        # A dict of a class of its own (OrderedDict, ModelOutput) is built by its class when the code runs.
        kind = type(items)
        arguments = {self._key(key): self.create_arg(item) for key, item in items.items()}
        if issubclass(kind, (ImmutableDict, defaultdict)):
            return arguments
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        names = attributes_of(items).keys()
        is_in_order = [field.name for field in fields if field.name in arguments] == list(arguments)
        if fields and is_in_order and arguments.keys() | names <= {field.name for field in fields if field.init}:
            # An output of diffusers or transformers. A field that is None has no key; one that was set later comes
            # last, also as an item by its number.
            required = [each.name for each in fields if each.init and _has_no_default(each)]
            return self.create_node("call_function", kind, (), {**dict.fromkeys(required), **arguments})
        if names or any("__init__" in vars(base) for base in kind.__mro__ if base not in (OrderedDict, dict, object)):
            attributes = None if getattr(items, "__dict__", None) is items else self._attributes_of(items)
            given = () if attributes == {} else (attributes,)
            return self.create_node("call_function", rebuild_dict, (kind, arguments, *given), {})
        return self.create_node("call_function", kind, (arguments,), {})

    def _key(self, key: Any) -> Any:
        if type(key) is str:
            return key
        if issubclass(type(key), Proxy):
            raise refusal(self, ControlFlowError, f"a traced value ({key!r}) is the key of a dictionary")
        return key

    def where(self) -> str:
        """Say which module runs, for messages."""
        return "the graph"

    def to_bool(self, obj: Proxy) -> bool:
        """Answer `if value:`; by default refuse. Override where the answer is known."""
        # The words of torch.fx's message stand in it too, for code that looks for them.
        what = (
            f"the truth of a traced value decides what runs ({obj!r}), and symbolically traced variables cannot be "
            "used as inputs to control flow,"
        )
        self.refused = refusal(self, ControlFlowError, what)
        raise self.refused

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Answer a loop over a value of unknown length; by default refuse. `a, b = value` does not come here."""
        reason = "and a Proxy object cannot be iterated,"
        what = f"a loop or a `*` runs over a traced value of unknown length ({obj!r}), {reason}"
        self.refused = refusal(self, ControlFlowError, what)
        raise self.refused

    def keys(self, obj: Proxy) -> Any:
        """Answer `value.keys()`, which `**value` calls too; by default record it as a method call."""
        return self.create_proxy("call_method", "keys", (obj,), {})


class GraphAppendingTracer(TracerBase):
    """Appends to a graph what is done with proxies of its nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _has_own_constructor(kind: type) -> bool:
    """Say whether a class of tuples makes something of what it is given."""
    owner = next(base for base in kind.__mro__ if "__new__" in vars(base))
    # A named tuple has `_fields` next to its `__new__`; classes in C are those of torch.
    return (
        "_fields" not in vars(owner) if hasattr(kind, "_fields") else isinstance(vars(owner)["__new__"], staticmethod)
    )


def _only_assigns(kind: Any) -> bool:
    """Say whether the constructor of a dataclass does nothing but assign its arguments to the fields."""
    code = getattr(kind.__init__, "__code__", None)
    is_generated = code is not None and code.co_filename == "<string>"
    takes_all = all(field.init for field in dataclasses.fields(kind))
    return is_generated and takes_all and not hasattr(kind, "__post_init__")
