from __future__ import annotations

import builtins
import dataclasses
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.nn import functional

import featx
from featx import Graph, GraphModule
from featx.codegen.emit import emit
from featx.errors import ArgumentTypeError, ForeignNodeError, GraphError
from featx.tracing.guards.guards import check_is_tensor


def both(build: Callable[[Any], Any]) -> tuple[str, str]:
    """Return the code that torch.fx and featx write for the graph that `build` makes of an empty one."""
    theirs, ours = torch.fx.Graph(), Graph()
    build(theirs)
    build(ours)
    return theirs.python_code("self").src, ours.python_code("self").src


def body(graph: Graph, root: str = "self") -> list[str]:
    return [line.strip() for line in graph.python_code(root).src.strip().split("\n")]


def run(graph: Graph, *args: Any, **kwargs: Any) -> Any:
    return GraphModule(nn.Module(), graph)(*args, **kwargs)


# -- as torch.fx writes it --------------------------------------------------------------------------------------------


def calls_of_every_kind(graph: Any) -> None:
    x, y = graph.placeholder("x"), graph.placeholder("y", default_value=None)
    graph.placeholder("*args")
    graph.placeholder("**kwargs")
    relu = graph.call_function(torch.relu, (x,))
    pool = graph.call_function(functional.max_pool2d, (relu, 2), {"stride": (1, [2])})
    method = graph.call_method("view", (pool, -1, {"k": y}))
    graph.output((method, [relu]))


def operators(graph: Any) -> None:
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for name in "add sub mul truediv floordiv mod pow matmul eq ne lt le gt ge lshift rshift and_ or_ xor".split():
        x = graph.call_function(getattr(operator, name), (x, y))
    for name in ("neg", "pos", "invert"):
        x = graph.call_function(getattr(operator, name), (x,))
    graph.output(x)


def attributes_and_items(graph: Any) -> None:
    x = graph.placeholder("x")
    shape = graph.call_function(getattr, (x, "shape"))
    first = graph.call_function(operator.getitem, (shape, 0))
    graph.output(graph.call_function(operator.getitem, (x, (slice(None, first, 2), None))))


def unused_values(graph: Any) -> None:
    x = graph.placeholder("x")
    graph.placeholder("unused")
    graph.call_function(torch.relu, (x,))
    last = graph.call_function(torch.neg, (x,))
    graph.call_function(torch.add, (last, x))
    graph.output(None)


def names_that_are_taken(graph: Any) -> None:
    x = graph.placeholder("input")
    for name in ("len", "torch", "class", "_", "x"):
        x = graph.create_node("call_function", torch.relu, (x,), name=name)
    graph.output(x)


def literals(graph: Any) -> None:
    x = graph.placeholder("x", default_value=-1.0)
    values = [torch.float32, torch.channels_last, torch.strided, float("inf"), [None, (1,)], "s", {"k": x}]
    graph.output(graph.call_function(torch.zeros, (values, slice(1, x)), {"dtype": torch.int64}))


def annotated(graph: Any) -> None:
    x = graph.placeholder("x", type_expr=torch.Tensor)
    graph.output(graph.create_node("call_function", torch.relu, (x,), type_expr=int), type_expr=torch.Tensor)


def own_function(x: Any) -> Any:
    return x


def functions_from_elsewhere(graph: Any) -> None:
    x = graph.placeholder("x")
    for function in (math.sqrt, own_function, own_function, len, torch.fft.fft):
        x = graph.call_function(function, (x,))
    graph.output(x)


def nothing(graph: Any) -> None:
    graph.output(None)


@pytest.mark.parametrize(
    "build",
    [calls_of_every_kind, operators, attributes_and_items, unused_values, names_that_are_taken, literals, annotated,
     functions_from_elsewhere, nothing],
)  # fmt: skip
def test_code_is_that_of_torch_fx(build: Callable[[Any], Any]) -> None:
    theirs, ours = both(build)
    assert ours.rstrip() == theirs.rstrip()


@pytest.mark.parametrize(
    ("root", "paths"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["0", "1"]),
        (nn.ModuleDict({"a-b": nn.ReLU(), "ok": nn.ReLU()}), ["a-b", "ok"]),
        (nn.Sequential(nn.Sequential(nn.ReLU())), ["0.0"]),
    ],
)
def test_code_of_modules_that_share_no_prefix_is_that_of_torch_fx(root: nn.Module, paths: list[str]) -> None:
    def build(graph: Any) -> None:
        graph.owning_module = root
        x = graph.placeholder("x")
        for path in paths:
            x = graph.call_module(path, (x,))
        graph.output(x)

    theirs, ours = both(build)
    assert ours.rstrip() == theirs.rstrip()


# -- statements -------------------------------------------------------------------------------------------------------


def test_value_is_freed_after_its_last_use_and_one_that_nobody_reads_at_once() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    relu = graph.call_function(torch.relu, (x,))
    graph.call_function(torch.neg, (relu,))
    add = graph.call_function(torch.add, (relu, y))
    graph.output((add, x))
    assert body(graph) == [
        "def forward(self, x, y):",
        "relu = torch.relu(x)",
        "neg = torch.neg(relu);  neg = None",
        "add = torch.add(relu, y);  relu = y = None",
        "return (add, x)",
    ]


def test_freed_values_are_gone_while_later_statements_run() -> None:
    graph = Graph()
    kept = graph.call_function(torch.neg, (graph.placeholder("x"),))
    alive: list[weakref.ref[torch.Tensor]] = []
    graph.call_function(lambda value: alive.append(weakref.ref(value)), (kept,))
    graph.output(graph.call_function(lambda: alive[0]() is None))
    assert run(graph, torch.ones(1)) is True


def test_setitem_is_written_as_an_assignment() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(operator.setitem, (x, (0, slice(None)), -1))
    graph.output(x)
    assert run(graph, torch.zeros(2, 2)).tolist() == [[-1, -1], [0, 0]]
    assert body(graph)[1] == "x[(0, slice(None, None, None))] = -1"


def test_check_of_featx_is_a_statement_with_a_short_name() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(check_is_tensor, (x, "the input"))
    graph.output(x)
    assert body(graph)[1:] == ["featx_check_is_tensor(x, 'the input')", "return x"]
    assert run(graph, torch.ones(1)).item() == 1
    with pytest.raises(featx.FeatxError, match="the input"):
        run(graph, 2)


@pytest.mark.parametrize("name", ["iadd", "imul", "isub"])
def test_in_place_operator_writes_its_input(name: str) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(getattr(operator, name), (x, 2)))
    tensor = torch.ones(2)
    expected = getattr(operator, name)(torch.ones(2), 2)
    result = run(graph, tensor)
    assert result is tensor
    assert torch.equal(result, expected)


def test_method_of_a_literal_is_called() -> None:
    graph = Graph()
    graph.output((graph.call_method("bit_length", (5,)), graph.call_method("join", ("-", ["a", "b"]))))
    assert run(graph) == (3, "a-b")


@pytest.mark.parametrize("attribute", ["real", "class", "not an identifier", 'quo"te'])
def test_attribute_of_any_name_is_read(attribute: str) -> None:
    class Holder:
        pass

    holder = Holder()
    setattr(holder, attribute, 7)
    graph = Graph()
    graph.output(graph.call_function(getattr, (graph.placeholder("x"), attribute)))
    assert run(graph, holder) == 7


def test_attribute_of_a_literal_is_read() -> None:
    graph = Graph()
    graph.output((graph.call_function(getattr, (-3, "real")), graph.call_function(getattr, (2.5, "imag"))))
    assert run(graph) == (-3, 0.0)


def test_item_of_a_negative_literal_expression_binds_as_a_call_does() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.getitem, ((1, 2, 3), graph.call_function(operator.neg, (x,)))))
    assert run(graph, 1) == 3


def test_keyword_arguments_that_are_keywords_are_passed() -> None:
    graph = Graph()
    graph.output(graph.call_function(dict, (), {"from": 1, "to": graph.placeholder("x"), "class": -2}))
    assert run(graph, 5) == {"from": 1, "to": 5, "class": -2}


def test_graph_without_output_returns_nothing() -> None:
    assert run(Graph()) is None


# -- inputs and names -------------------------------------------------------------------------------------------------


def test_inputs_of_every_kind_arrive() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b", default_value=(1, float("-inf")))
    rest, options = graph.placeholder("*rest"), graph.placeholder("**options")
    graph.output((a, b, rest, options))
    assert run(graph, 1) == (1, (1, float("-inf")), (), {})
    assert run(graph, 1, 2, 3, k=4) == (1, 2, (3,), {"k": 4})


def test_input_added_late_keeps_its_value_when_a_node_has_its_name() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(operator.neg, (x,), name="y")
    graph.output((first, graph.placeholder("y")))
    assert run(graph, 1, 5) == (-1, 5)


def test_inputs_whose_nodes_were_renamed_crosswise_keep_their_values() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.name, b.name = "b", "a"
    graph.output((a, b))
    assert run(graph, 1, 2) == (1, 2)


@pytest.mark.parametrize("name", ["torch", "self", "inf", "nan"])
def test_input_whose_name_the_code_needs_is_refused(name: str) -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.relu, (graph.placeholder(name),)))
    with pytest.raises(GraphError, match=f"an input cannot be named '{name}'"):
        graph.python_code("self")


@pytest.mark.parametrize(
    "inputs",
    [["*a", "*b"], ["**a", "b"], ["**a", "*b"], ["**a", "**b"], ["b", "**a", "c"]],
    ids=lambda names: " ".join(names),
)
def test_input_behind_one_that_takes_the_rest_is_refused(inputs: list[str]) -> None:
    graph = Graph()
    graph.output([graph.placeholder(name) for name in inputs])
    with pytest.raises(GraphError, match="must come before the input with"):
        graph.python_code("self")


def test_rest_of_the_inputs_has_no_default_and_may_be_marked_keyword_only() -> None:
    graph = Graph()
    rest, options, last = graph.placeholder("*rest"), graph.placeholder("last"), graph.placeholder("**options")
    rest.meta["keyword_only"] = last.meta["keyword_only"] = True
    graph.output((rest, options, last))
    assert run(graph, 1, last=2, more=3) == ((1,), 2, {"more": 3})
    rest.args = (1,)
    with pytest.raises(GraphError, match="can have no default"):
        graph.python_code("self")


@pytest.mark.parametrize("root", ["", "a b", "class", "torch", "self=print()", "\ufb01"])
def test_root_that_code_cannot_name_is_refused(root: str) -> None:
    with pytest.raises(GraphError, match="cannot call its module"):
        Graph().python_code(root)


def test_root_that_is_called_like_a_builtin_does_not_hide_it() -> None:
    graph = Graph()
    graph.output(graph.call_function(len, (graph.placeholder("x"),)))
    assert body(graph, "len") == ["def forward(len, x):", "len_1 = builtins_len(x);  x = None", "return len_1"]


def test_target_that_is_assigned_later_is_refused_by_lint_and_when_the_code_is_made() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    method = graph.call_method("relu", (x,))
    graph.output(method)
    method.target = "relu(); print()"
    for refuses in (graph.lint, lambda: graph.python_code("self")):
        with pytest.raises(ArgumentTypeError, match=r"call_method node.*must be an identifier"):
            refuses()
    method.target, x.target = "relu", "x=print()"
    with pytest.raises(ArgumentTypeError, match=r"placeholder node 'x' must be an identifier"):
        graph.lint()
    with pytest.raises(GraphError, match="cannot name an input"):
        graph.python_code("self")


def test_keywords_are_strings_each_once() -> None:
    class Text(str):
        __slots__ = ()
        __hash__ = object.__hash__

    graph = Graph()
    with pytest.raises(ArgumentTypeError, match="a keyword of kwargs must be a string, got 1 of type int"):
        graph.call_function(dict, (), {1: 2})
    with pytest.raises(ArgumentTypeError, match="'a' twice"):
        graph.call_function(dict, (), {"a": 1, Text("a"): 2})


@pytest.mark.parametrize("name", ["slice", "range", "len", "getattr", "complex", "frozenset", "max", "input"])
def test_input_that_is_called_like_a_builtin_does_not_hide_it(name: str) -> None:
    graph = Graph()
    value = graph.placeholder(name)
    constants = (slice(1, 2), range(2), complex(1, -0.0), frozenset({1}))
    graph.output((value, constants, graph.call_function(builtins.max, (1, 2)), graph.call_function(len, ("ab",))))
    assert run(graph, "given") == ("given", constants, 2, 2)


def test_two_functions_of_one_name_are_told_apart() -> None:
    def make(number: int) -> Callable[[], int]:
        def function() -> int:
            return number

        return function

    graph = Graph()
    graph.output(tuple(graph.call_function(make(number)) for number in (1, 2)))
    assert run(graph) == (1, 2)


def test_node_named_like_a_global_of_the_code_does_not_hide_it() -> None:
    graph = Graph()
    x = graph.placeholder("math_sqrt")
    root = graph.call_function(math.sqrt, (x,), name="torch_relu")
    graph.output(graph.call_function(math.sqrt, (root,)))
    assert run(graph, 16) == 2


def test_node_named_like_a_module_prefix_does_not_hide_it() -> None:
    model = nn.Module()
    model.block = nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})
    graph = Graph()
    x = graph.placeholder("block")
    for path in ("block.a", "block.b"):
        x = graph.call_module(path, (x,))
    graph.output(x)
    assert GraphModule(model, graph)(3) == 3
    assert body(graph)[1] == "block_1 = self.block"


def test_root_may_have_another_name() -> None:
    graph = Graph()
    graph.output((graph.get_attr("weight"), torch.ones(1)))
    assert body(graph, "module") == [
        "def forward(module):",
        "weight = module.weight",
        "return (weight, module._tensor_constant0)",
    ]


# -- the result -------------------------------------------------------------------------------------------------------


def test_tensors_are_listed_once_each() -> None:
    graph, one, two = Graph(), torch.ones(1), torch.ones(1)
    graph.output((one, [two, one]))
    code = emit(graph)
    assert list(code.tensors) == ["_tensor_constant0", "_tensor_constant1"]
    assert [tensor is other for tensor, other in zip(code.tensors.values(), (one, two), strict=True)] == [True, True]
    assert body(graph)[-1] == "return (self._tensor_constant0, [self._tensor_constant1, self._tensor_constant0])"


def test_caller_may_name_the_tensors() -> None:
    graph = Graph()
    graph.output(torch.ones(1))
    code = emit(graph, name_tensor=lambda tensor: "ones")
    assert "return self.ones" in code.src
    assert list(code.tensors) == ["ones"]


def test_lines_lead_back_to_the_nodes() -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})})
    graph = Graph()
    x = graph.placeholder("input")
    for path in ("block.a", "block.b"):
        x = graph.call_module(path, (x,))
    graph.output(graph.call_function(torch.relu, (x,)))
    code = GraphModule(model, graph).recompile()
    source = code.src.split("\n")
    assert {name: source[number - 1].split(" = ")[0].strip() for number, name in code.lines.items()} == {
        "block_a": "block_a",
        "block_b": "block_b",
        "relu": "relu",
    }


def test_globals_are_exactly_what_the_code_refers_to_besides_the_always_known() -> None:
    graph = Graph()
    graph.output(graph.call_function(math.sqrt, (graph.placeholder("x"),)))
    known = {"torch", "device", "inf", "nan", "NoneType"}
    assert {name: value for name, value in emit(graph).globals.items() if name not in known} == {"math_sqrt": math.sqrt}


def test_verbose_code_says_where_a_node_comes_from() -> None:
    graph = Graph()
    relu = graph.call_function(torch.relu, (graph.placeholder("x"),))
    relu.stack_trace = 'File "model.py", line 3\n    x = relu(x)'
    graph.output(relu)
    assert '    # File "model.py", line 3\n    relu = ' in graph.python_code("self", verbose=True).src
    assert "model.py" not in graph.python_code("self").src


def test_emitting_does_not_change_the_graph() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), torch.ones(1))))
    before, edits = str(graph), graph.edits
    assert emit(graph).src == emit(graph).src
    assert (str(graph), graph.edits) == (before, edits)


@pytest.mark.parametrize("erased", [False, True])
def test_argument_that_is_not_in_the_graph_is_refused(erased: bool) -> None:
    graph = Graph()
    loose = (graph if erased else Graph()).call_function(torch.zeros, (1,), name="loose")
    graph.output([loose])
    if erased:
        graph.root.prev.args = (1,)
        graph.erase_node(loose)
        graph.root.prev.args = ([loose],)
    with pytest.raises(ForeignNodeError, match="'loose'"):
        GraphModule(nn.Module(), graph)


@dataclasses.dataclass(frozen=True)
class Box:
    content: Any


@pytest.mark.parametrize(
    "wrap", [lambda value: {value}, lambda value: {value: 1}, Box], ids=["set", "key", "dataclass"]
)
def test_node_inside_a_set_a_key_or_a_dataclass_is_refused_or_right(wrap: Callable[[Any], Any]) -> None:
    graph = Graph()
    node = graph.call_function(operator.neg, (graph.placeholder("x"),))
    try:
        graph.output(wrap(node))
        result = run(graph, 3)
    except ArgumentTypeError:
        return
    assert result == wrap(-3)


def test_error_of_an_argument_that_no_code_can_express_names_the_node() -> None:
    graph = Graph()
    graph.call_function(torch.relu, (nn.ReLU(),), name="culprit")
    with pytest.raises(ArgumentTypeError) as caught:
        graph.python_code("self")
    assert "culprit" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"


def test_public_name_of_the_result_is_python_code() -> None:
    assert type(Graph().python_code("self")) is featx.PythonCode


def test_in_place_operator_is_written_as_the_model_writes_it() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(operator.iadd, (x, x), type_expr=torch.Tensor)
    graph.output((graph.call_function(operator.ipow, (total, 2)), graph.call_function(operator.iadd, ([1], [2]))))
    assert body(graph)[1:3] == [
        "iadd : torch.Tensor = x;  iadd += x;  x = None",
        "ipow = iadd;  ipow **= 2;  iadd = None",
    ]
    values = run(graph, torch.full((2,), 3.0))
    assert (values[0].tolist(), values[1]) == ([36.0, 36.0], [1, 2])


def test_error_inside_nested_regions_leaves_autocast_as_it_was() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    regions = [
        graph.call_function(_enter_autocast, ("cpu", dtype, True, True)) for dtype in (torch.bfloat16, torch.float16)
    ]
    graph.call_method("view", (x, 3, 3))
    for region in reversed(regions):
        graph.call_function(_exit_autocast, (region,))
    graph.output(x)
    before = torch.get_autocast_dtype("cpu")
    try:
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            run(graph, torch.ones(4))
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (False, before)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", before)
