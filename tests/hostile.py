"""What the tests of hostile names share: texts that try to get code into generated source, and graphs with them."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import operator
import unicodedata
from collections.abc import Callable, Generator
from keyword import iskeyword
from typing import Any, cast

import torch
from hypothesis import strategies
from torch import nn

from featx import Graph, GraphModule

PAYLOAD = "__import__('builtins').__dict__.__setitem__('featx_was_here', 1)"

# A text that is written raw runs the payload in at least one of these, wherever in a statement it stands.
HOSTILE = [
    PAYLOAD, f"a={PAYLOAD}, b", f"a: {PAYLOAD} = 1", f"a=({PAYLOAD})", f"x); {PAYLOAD}; (", f"x; {PAYLOAD}; y",
    f"x]; {PAYLOAD}; [", f"x}}; {PAYLOAD}; {{", f'x", {PAYLOAD}, "', f"x', {PAYLOAD}, '", f'x") or {PAYLOAD} or ("',
    f"x') or {PAYLOAD} or ('", f"x\\', {PAYLOAD}, '", f'x\\", {PAYLOAD}, "', f"x\n{PAYLOAD}",
    f"x\n    {PAYLOAD}\n    y",
    f"x # \n    {PAYLOAD}", f"x\r    {PAYLOAD}\r", f"x\x0c{PAYLOAD}", f"x\u2028{PAYLOAD}", f"{{{PAYLOAD}}}",
    f"{{{PAYLOAD}!r:>{{{PAYLOAD}}}}}", f'"""\n{PAYLOAD}\n"""', f"x\\\n{PAYLOAD}", f"(x := {PAYLOAD})", f"x[{PAYLOAD}]",
    f"lambda: {PAYLOAD}", f"relu(x)) + ({PAYLOAD})", f"torch.{PAYLOAD}", f"x=1):\n    {PAYLOAD}\n    return (",
]  # fmt: skip

# Texts that are no usual names, and identifiers that Python or the generated code reads as something else.
UNUSUAL = [
    "", " ", "a b", "a-b", "0", "a.b", ".", "a..b", "class", "None", "match", "__debug__", "__x", "__x__", "ﬁ", "ªb",
    "e\u0301", "ünï", "K", "x²", "\ud800", "a\udfff", "a\0b", "\0", "a\nb", "\n", "a\n", "a\rb", "\x85", "\u200b",
    "torch", "self", "getattr", "inf", "nan", "device", "grad_enabled", "dict", "# COUNTER: 0", "%s", "{x}", "{", "\\",
    "a\\", "'", '"', "'\"", "*", "**", "*a", "***a", "\t", "forward", "training", "graph", "_modules",
    "__class__", "__dict__",
]  # fmt: skip

TEXTS = (
    strategies.sampled_from(HOSTILE + UNUSUAL)
    | strategies.lists(
        strategies.sampled_from(
            [PAYLOAD, "x", "=", "(", ")", "[", "]", "{", "}", "'", '"', "\\", "\n", "\n    ", "#", ",", ".", ";", ":",
             " ", "*", "ﬁ", "\ud800", "\0", "class", '"""', "@", "\r"]
        ),
        max_size=6,
    ).map("".join)
    | strategies.text(strategies.characters(), max_size=5)
)  # fmt: skip


class Loud(str):
    """A string that prints as another text than it holds, in every way in which a string is printed."""

    shown: str

    def __new__(cls, text: str, shown: str) -> Loud:
        made = super().__new__(cls, text)
        made.shown = shown
        return made

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return self.shown

    def __format__(self, spec: str) -> str:
        return self.shown

    def lstrip(self, *_: object) -> str:
        return self.shown

    removeprefix = replace = strip = lower = lstrip  # pyright: ignore[reportAssignmentType]


@contextlib.contextmanager
def nothing_runs() -> Generator[None, None, None]:
    """Assert at the end that no payload ran."""
    try:
        yield
        assert not hasattr(builtins, "featx_was_here"), "a text was run as code"
    finally:
        builtins.__dict__.pop("featx_was_here", None)


@dataclasses.dataclass
class Case:
    """A graph with a text in it, what it runs on, and what it is to return; if `works`, it must not be refused."""

    graph: Graph
    expected: Any
    works: bool
    root: nn.Module = dataclasses.field(default_factory=nn.Module)
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    class_name: str = "GraphModule"

    def returning(self, value: Any, kind: Any = None) -> Case:
        self.graph.output(value, kind)
        return self


class Holder(nn.Module):
    """Returns what it is called with, and so does each of its attributes that `holding` makes."""

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def method(self, /, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Tagged(nn.Module):
    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag

    def forward(self, *args: Any) -> Any:
        return self.tag, *args


def is_plain(text: str) -> bool:
    is_name = text.isidentifier() and not iskeyword(text) and text != "__debug__"
    return is_name and unicodedata.normalize("NFKC", text) == text


def tree(path: str) -> nn.Module:
    """Return a module that has a `Tagged` at the dotted path, and others where Python could look by mistake."""
    root = Holder()
    owner: nn.Module = root
    parts = path.split(".")
    for part in parts:
        for name in (unicodedata.normalize("NFKC", part), part.strip(), part):
            if name and name != part:
                owner._modules[name] = Tagged("another")
        owner._modules[part] = Tagged("wanted") if part is parts[-1] else Holder()
        owner = cast(nn.Module, owner._modules[part])
    owner.tag = "wanted"
    return root


def is_free(path: str) -> bool:
    # A GraphModule has these for itself.
    first = path.partition(".")[0]
    is_taken = hasattr(GraphModule, first) or first in GraphModule.__annotations__
    return not is_taken and not any(
        part == "" or hasattr(nn.Module, part) or part in nn.Module.__annotations__ for part in path.split(".")
    )


def keyword_of_function(text: str) -> Case:
    case = Case(Graph(), {text: 7, "last": 8}, works=True, inputs={"x": 7})
    return case.returning(case.graph.call_function(dict, (), {text: case.graph.placeholder("x"), "last": 8}))


def keyword_of_method(text: str) -> Case:
    case = Case(Graph(), ((), {text: 7}), works=True, inputs={"x": Holder()})
    return case.returning(case.graph.call_method("method", (case.graph.placeholder("x"),), {text: 7}))


def keyword_of_module(text: str) -> Case:
    root = nn.Module()
    root.child = Holder()
    text = text if text != "self" else "other"  # nn.Module takes none of that name
    case = Case(Graph(), ((), {text: 7}), works=True, root=root)
    return case.returning(case.graph.call_module("child", (), {text: 7}))


def method(text: str) -> Case:
    holder = type("Plain", (), {})()
    for name in (unicodedata.normalize("NFKC", text), text):
        vars(holder)[name] = Tagged(name)
    if not isinstance(getattr(holder, text), Tagged):
        text = "__call__"  # what each object has, such as `__class__`, goes before what this one holds
        vars(holder)[text] = Tagged(text)
    case = Case(Graph(), (plain_str(text), 3), works=text.isidentifier(), inputs={"x": holder})
    return case.returning(case.graph.call_method(text, (case.graph.placeholder("x"), 3)))


def module_path(text: str) -> Case:
    case = Case(Graph(), ("wanted", 3), works=is_free(text), root=tree(text), inputs={"getattr": 3})
    return case.returning(case.graph.call_module(text, (case.graph.placeholder("getattr"),)))


def shared_prefix(text: str) -> Case:
    root = tree(text + ".a")
    owner = root
    for part in text.split("."):
        owner = cast(nn.Module, owner._modules[part])
    owner._modules["b"] = Tagged("other")
    case = Case(Graph(), (("wanted",), ("other",)), works=is_free(text), root=root)
    return case.returning((case.graph.call_module(text + ".a"), case.graph.call_module(text + ".b")))


def attribute_path(text: str) -> Case:
    case = Case(Graph(), "wanted", works=is_free(text), root=tree(text))
    return case.returning(case.graph.get_attr(f"{text}.tag"))


def attribute_of_a_value(text: str) -> Case:
    holder = type("Plain", (), {})()
    for name in (unicodedata.normalize("NFKC", text), text):
        vars(holder)[name] = name
    case = Case(Graph(), getattr(holder, text), works=True, inputs={"getattr": holder})
    return case.returning(case.graph.call_function(getattr, (case.graph.placeholder("getattr"), text)))


def placeholder(text: str) -> Case:
    text = text.lstrip("*") if type(text) is str else text
    works = is_plain(text) and text not in ("self", "torch", "inf", "nan")
    case = Case(Graph(), (7, 8), works=works, inputs={text: 7, "grad_enabled_1": 8})
    x, y = case.graph.placeholder(text), case.graph.placeholder("grad_enabled_1")
    if works:
        case.graph.call_function(torch._C._set_grad_enabled, (True,))
    return case.returning((x, y))


def rest_of_inputs(text: str) -> Case:
    case = Case(
        Graph(), {"a": 7}, works=is_plain(text) and text not in ("self", "torch", "inf", "nan"), inputs={"a": 7}
    )
    return case.returning(case.graph.placeholder(f"**{text}"))


def name_of_node(text: str) -> Case:
    case = Case(Graph(), (-7, 7), works=True, inputs={"x": 7})
    x = case.graph.placeholder("x")
    return case.returning((case.graph.create_node("call_function", operator.neg, (x,), name=text), x))


def name_of_node_set_later(text: str) -> Case:
    case = Case(Graph(), (-7, 7), works=True, inputs={"x": 7})
    x = case.graph.placeholder("x")
    node = case.graph.call_function(operator.neg, (x,))
    x.name = node.name = text
    return case.returning((node, x))


def text_in_arguments(text: str) -> Case:
    value = {text: [text, (text, {text: {1: text}})], (text, 1): {"k": frozenset({text})}, "s": slice(text, None)}
    case = Case(Graph(), value, works=True)
    return case.returning(value)


def text_as_default(text: str) -> Case:
    case = Case(Graph(), text, works=True)
    return case.returning(case.graph.placeholder("x", default_value=text))


def key_of_item(text: str) -> Case:
    case = Case(Graph(), 7, works=True, inputs={"x": {text: 7}})
    return case.returning(case.graph.call_function(operator.getitem, (case.graph.placeholder("x"), text)))


def key_of_written_item(text: str) -> Case:
    case = Case(Graph(), {text: text}, works=True, inputs={"x": {}})
    x = case.graph.placeholder("x")
    case.graph.call_function(operator.setitem, (x, text, text))
    return case.returning(x)


def annotation(text: str) -> Case:
    case = Case(Graph(), -7, works=True, inputs={"x": 7})
    x = case.graph.placeholder("x", type_expr=text)
    node = case.graph.create_node("call_function", operator.neg, (x,), type_expr=list[text])
    node = case.graph.create_node("call_function", operator.pos, (node,), type_expr=text)
    return case.returning(node, text)


def name_of_annotation(text: str) -> Case:
    kind = type("Kind", (), {"__module__": text, "__qualname__": plain_str(text)})
    other = type("Kind", (), {"__module__": f"torch.{text}"})
    case = Case(Graph(), -7, works=True, inputs={"x": 7})
    x = case.graph.placeholder("x", type_expr=kind)
    return case.returning(case.graph.create_node("call_function", operator.neg, (x,), type_expr=other), list[kind])


def name_of_function(text: str) -> Case:
    class Named:
        __module__ = f"torch.{text}"

        def __call__(self) -> str:
            return "first"

    def function() -> str:
        return "second"

    first = Named()
    first.__name__ = text
    function.__name__ = function.__qualname__ = plain_str(text)
    function.__module__ = text
    case = Case(Graph(), ("first", "second", first, function), works=True)
    return case.returning((case.graph.call_function(first), case.graph.call_function(function), first, function))


def member(text: str) -> Case:
    members: dict[str, Any] = {"a": 1, plain_str(text): 2}
    try:
        kind = enum.Enum("Kind", members)
        wanted = kind[text]
    except (ValueError, TypeError, KeyError):
        kind = enum.Enum("Kind", {"a": 2})
        wanted = kind["a"]
    case = Case(Graph(), wanted, works=True)
    return case.returning(wanted)


def class_name(text: str) -> Case:
    return Case(Graph(), 7, works=True, class_name=text).returning(7)


def meta(text: str) -> Case:
    case = Case(Graph(), -7, works=True, inputs={"x": 7})
    node = case.graph.call_function(operator.neg, (case.graph.placeholder("x"),))
    node.meta.update(qualified_name=text, source=text, stack_trace=text)
    return case.returning(node)


def plain_str(text: str) -> str:
    return str.__str__(text)


PLACES: list[Callable[[str], Case]] = [
    keyword_of_function, keyword_of_method, keyword_of_module, method, module_path, shared_prefix, attribute_path,
    attribute_of_a_value, placeholder, rest_of_inputs, name_of_node, name_of_node_set_later, text_in_arguments,
    text_as_default, key_of_item, key_of_written_item, annotation, name_of_annotation, name_of_function, member,
    class_name, meta,
]  # fmt: skip
