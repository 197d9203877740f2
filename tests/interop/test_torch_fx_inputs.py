"""to_torch_fx: inputs of every kind, their defaults and annotations, and names that torch.fx's code gives a meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
import torch.fx
from torch import nn

import featx
from tests.ids import without_address

X, Y = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])


def plain(x: torch.Tensor, y: torch.Tensor):
    return x - y


def defaults(
    x: torch.Tensor, scale: float = 2.0, shift: Any = -1.0, flag: bool = True, mode: torch.Tensor | None = None
):
    return x * scale + shift


def annotated(x: torch.Tensor, scale: float = 2.0, other: Optional[torch.Tensor] = None) -> torch.Tensor:  # noqa: UP045
    return x * scale


def rest(x: torch.Tensor, *others: Any):
    return x - others[0]


def keywords(x: torch.Tensor, **others: Any):
    return x - others["y"]


def everything(x: torch.Tensor, *others: Any, scale: torch.Tensor, shift: float = 1.0, **more: Any):
    return x * scale + shift - others[0] - more["y"]


def keyword_only(x: torch.Tensor, *, scale: torch.Tensor, shift: float = 1.0):
    return x * scale + shift


def keyword_only_behind_a_default(x: torch.Tensor, y: float = 2.0, *, scale: torch.Tensor):
    return x * scale - y


def builtin_names(input: Any, len: Any, device: Any, slice: Any):
    return input - len * device + slice


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "plain": (plain, [((X, Y), {}), ((X,), {"y": Y}), ((), {"y": X, "x": Y})]),
    "defaults": (defaults, [((X,), {}), ((X, 3.0), {}), ((X,), {"shift": 5.0})]),
    "annotated": (annotated, [((X,), {}), ((X,), {"scale": 5.0})]),
    "rest": (rest, [((X, Y), {})]),
    "keywords": (keywords, [((X,), {"y": Y})]),
    "everything": (everything, [((X, Y), {"scale": 2.0, "y": Y}), ((X, Y), {"scale": 2.0, "y": Y, "shift": 0.0})]),
    "keyword only": (keyword_only, [((X,), {"scale": 3.0}), ((X,), {"shift": 2.0, "scale": 3.0})]),
    "after a default": (keyword_only_behind_a_default, [((X,), {"scale": 3.0}), ((X, Y), {"scale": 3.0})]),
    "builtin names": (builtin_names, [((X, Y, X, Y), {}), ((X, Y), {"device": X, "slice": Y})]),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_taken_as_the_function_takes_them(name: str, assert_same: Any) -> None:
    function, calls = CALLS[name]
    traced = featx.symbolic_trace(function)
    converted = featx.to_torch_fx(traced)
    assert_same(traced.graph, converted.graph)
    back = featx.from_torch_fx(converted)
    assert_same(traced.graph, back.graph)
    assert back.code == traced.code
    for args, kwargs in calls:
        for runs in (converted, back):
            assert torch.equal(runs(*args, **kwargs), function(*args, **kwargs))
    expected = inspect.signature(function).parameters
    found = inspect.signature(converted.forward).parameters
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("everything", "keywords", "keyword only", "after a default")]
)
def test_inputs_of_a_trace_of_torch_fx_are_taken_as_it_takes_them(name: str, assert_same: Any) -> None:
    function, calls = CALLS[name]
    traced = torch.fx.symbolic_trace(function)
    converted = featx.from_torch_fx(traced)
    assert_same(traced.graph, converted.graph)
    again = featx.to_torch_fx(converted)
    assert again.code == traced.code
    for args, kwargs in calls:
        assert torch.equal(converted(*args, **kwargs), traced(*args, **kwargs))


def test_keyword_only_inputs_stay_so_in_copies_and_recompilations() -> None:
    import copy

    converted = featx.to_torch_fx(featx.symbolic_trace(keyword_only))
    copied = copy.deepcopy(converted)
    copied.recompile()
    for module in (converted, copied):
        with pytest.raises(TypeError, match="positional argument"):
            module(X, 2.0)
    assert featx.from_torch_fx(copied).code == featx.symbolic_trace(keyword_only).code


def test_inputs_that_are_fixed_are_checked() -> None:
    traced = featx.symbolic_trace(defaults, concrete_args={"flag": True, "mode": None, "scale": 3.0})
    converted = featx.to_torch_fx(traced)
    assert torch.equal(converted(X, 3.0), defaults(X, 3.0))
    with pytest.raises(AssertionError, match="scale has been specialized"):
        converted(X, 2.0)
    with pytest.raises(featx.TraceError, match="traced with mode=None"):
        converted(X, 3.0, mode="other")


# -- names -------------------------------------------------------------------------------------------------------------


def renamed(target: str, name: str, op: Callable[[featx.Graph, featx.Node], Any]) -> featx.GraphModule:
    """Return a module with an input whose name in the signature is not that of its node."""
    graph = featx.Graph()
    x = graph.placeholder(target)
    x.name = name
    graph.output(op(graph, x))
    return featx.GraphModule(nn.Module(), graph)


def test_input_may_have_another_name_than_its_node() -> None:
    converted = featx.to_torch_fx(renamed("image", "x", lambda graph, x: graph.call_method("neg", (x,))))
    assert torch.equal(converted(image=X), -X)


def test_node_may_have_the_name_of_an_input_that_was_read_before() -> None:
    def negate(graph: featx.Graph, x: featx.Node) -> featx.Node:
        y = graph.call_method("neg", (x,))
        y.name = "image"
        return graph.call_method("sub", (x, y))

    module = renamed("image", "x", negate)
    converted = featx.to_torch_fx(module)
    assert torch.equal(converted(X), X + X)
    assert [node.name for node in featx.from_torch_fx(converted).graph.nodes] == ["x", "image", "sub", "output"]


def test_two_inputs_with_each_others_names_are_refused() -> None:
    graph = featx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.name, y.name = "y", "x"
    graph.output(graph.call_method("sub", (x, y)))
    module = featx.GraphModule(nn.Module(), graph)
    assert torch.equal(module(X, Y), X - Y)
    with pytest.raises(featx.GraphError, match=r"input '[xy]' \(node '[xy]'\) hides .* rename the input"):
        featx.to_torch_fx(module)


HIDING: dict[str, tuple[str, Callable[[featx.Graph, featx.Node], Any]]] = {
    "a function": ("len", lambda graph, x: graph.call_function(len, (x,))),
    "a function that only a later node calls": (
        "max", lambda graph, x: graph.call_function(max, (graph.call_method("neg", (x,)), x))
    ),
    "a literal": ("device", lambda graph, x: graph.call_method("to", (x, torch.device("cpu")))),
    "a slice": ("slice", lambda graph, x: graph.call_method("__getitem__", (x, slice(0, 1)))),
    "a class": ("range", lambda graph, x: graph.call_function(list, (range(3),))),
}  # fmt: skip


@pytest.mark.parametrize("kind", HIDING)
def test_input_that_hides_what_the_code_uses_is_refused(kind: str) -> None:
    name, op = HIDING[kind]
    graph = featx.Graph()
    graph.output(op(graph, graph.placeholder(name)))
    with pytest.raises(featx.GraphError, match=rf"input '{name}' \(node '{name}_1'\) hides"):
        featx.to_torch_fx(graph)


def test_input_may_have_the_name_of_a_builtin_that_nothing_else_uses() -> None:
    def names_in_a_string(input: Any, torch_: torch.Tensor | None = None):
        return input.sum(dim="input".index("input"))

    traced = featx.symbolic_trace(names_in_a_string)
    assert torch.equal(featx.to_torch_fx(traced)(X), X.sum())


def test_name_of_the_module_is_refused() -> None:
    graph = featx.Graph()
    x = graph.call_method("neg", (graph.placeholder("x"),))
    x.name = "self"
    graph.output(x)
    with pytest.raises(featx.GraphError, match="node 'self' has the name by which"):
        featx.to_torch_fx(graph)
    graph = featx.Graph()
    graph.output(graph.placeholder("self"))
    with pytest.raises(featx.GraphError, match=r"by which torch\.fx's code calls the module"):
        featx.to_torch_fx(graph)


@pytest.mark.parametrize("name", ["input", "class", "layer1.0", "1st", "torch", "é", "x_7", "x_1", "relu_007"])
def test_names_that_torch_fx_would_change_stay(name: str, assert_same: Any) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    x_1 = graph.call_method("neg", (x,))
    x_1.name = name
    other = graph.call_method("abs", (x_1,))
    other.name = "x_2" if name != "x_2" else "z"
    graph.output(other)
    module = featx.GraphModule(nn.Module(), graph)
    converted = featx.to_torch_fx(module)
    assert_same(graph, converted.graph)
    assert torch.equal(converted(X), X.abs())
    assert_same(graph, featx.from_torch_fx(converted).graph)


def test_new_nodes_get_names_that_are_free() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("neg", (x,))
    y.name = "abs_1"
    graph.output(y)
    theirs = featx.to_torch_fx(graph)
    ours = featx.from_torch_fx(theirs)
    for one in (theirs, ours):
        with one.inserting_before(one.output_node()):
            added: Any = one.call_method("abs", (next(iter(one.nodes)),))  # pyright: ignore[reportArgumentType]
        assert added.name == "abs_2"
        one.lint()


# -- defaults and types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [torch.ones(2), plain, torch.Size([2]), {"a": plain}], ids=without_address)
def test_default_that_code_cannot_write_is_refused(default: Any) -> None:
    graph = featx.Graph()
    graph.output(graph.placeholder("x", default_value=default))
    with pytest.raises(featx.ArgumentTypeError, match=r"node 'x': its default .* cannot be written"):
        featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))


@pytest.mark.parametrize("default", [None, (1, 2), [1.5], {"a": [None]}, "text", -1, float("inf"), torch.float32])
def test_default_is_that_of_the_signature(default: Any) -> None:
    graph = featx.Graph()
    graph.output(graph.placeholder("x", default_value=default))
    assert featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))() == default


TYPES = [torch.Tensor, "torch.Tensor", Optional[int], int | None, list[torch.Tensor], tuple[int, ...], "a name"]  # noqa: UP045


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_types_stay(kind: Any, assert_same: Any) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x", kind)
    y = graph.call_method("neg", (x,), type_expr=kind)
    graph.output(y, kind)
    module = featx.GraphModule(nn.Module(), graph)
    converted = featx.to_torch_fx(module)
    assert torch.equal(converted(X), -X)
    assert_same(graph, featx.from_torch_fx(converted).graph)


def test_type_that_torch_fx_cannot_write_is_refused() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("neg", (x,), type_expr=Callable[[int], int]))
    if writes_callables():
        assert torch.equal(featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))(X), -X)
        return
    with pytest.raises(featx.ArgumentTypeError, match=r"code of node 'neg' \(call_method neg\).*its type"):
        featx.to_torch_fx(graph)


def writes_callables() -> bool:
    """Say whether this torch.fx writes code with the type of a function in it; those before 2.15 do."""
    graph = torch.fx.Graph()
    graph.output(graph.call_method("neg", (graph.placeholder("x"),), type_expr=Callable[[int], int]))
    try:
        torch.fx.GraphModule(nn.Module(), graph)
    except Exception:
        return False
    return True
