# pyright: reportMissingParameterType=false
# Annotations would be a part of the generated code that is compared here.
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional

import featx

FUNCTIONS = [
    torch.relu, functional.relu, functional.max_pool2d, torch.Tensor.add, operator.add, operator.getitem, getattr,
    math.sqrt, len, torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.fft.fft, torch.Size, nn.ReLU, torch._assert,
    torch.linalg.norm,
]  # fmt: skip
ARGUMENTS = [
    1, -2.5, float("inf"), float("nan"), 1j, True, None, "text", b"raw", ..., slice(None, 2), range(3), torch.float32,
    torch.device("cpu"), torch.channels_last, torch.strided, torch.Size([1, 2]), (), (1,), (1, 2), [], [1, [2]], {},
    {"k": (1, {"j": 2})}, torch.tensor([1.0, 2.0]), {1}, int, torch.relu,
]  # fmt: skip


def both(build: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the graphs that `build` makes of an empty graph of torch.fx and of featx."""
    theirs, ours = torch.fx.Graph(), featx.Graph()
    build(theirs)
    build(ours)
    return theirs, ours


def test_graph_prints_as_with_torch_fx_for_functions_of_every_kind() -> None:
    def build(graph: Any) -> None:
        x = graph.placeholder("x")
        for function in FUNCTIONS:
            graph.call_function(function, (x,), {"other": x})
        graph.output(x)

    theirs, ours = both(build)
    assert str(ours) == str(theirs)


def test_graph_prints_as_with_torch_fx_for_arguments_of_every_type() -> None:
    def build(graph: Any) -> None:
        x = graph.placeholder("x", default_value=(1, None))
        for argument in ARGUMENTS:
            graph.call_function(dict, (x, argument), {"k": [argument, x]})
        graph.output([x, {"k": (x, 3)}])

    theirs, ours = both(build)
    assert str(ours) == str(theirs)


def test_graph_prints_as_with_torch_fx_for_every_opcode() -> None:
    root = nn.Module()
    root.linear = nn.Linear(1, 1)

    def build(graph: Any) -> None:
        graph.owning_module = root
        x = graph.placeholder("x", type_expr=torch.Tensor)
        weight = graph.get_attr("linear.weight")
        linear = graph.call_module("linear", (x,))
        graph.call_method("view", (linear, -1), {"k": weight})
        graph.output((linear, weight))

    theirs, ours = both(build)
    assert str(ours) == str(theirs)


def test_output_annotation_prints_as_with_torch_fx() -> None:
    def build(graph: Any) -> None:
        graph.output(graph.placeholder("x", type_expr=int), type_expr=torch.Tensor)

    theirs, ours = both(build)
    assert str(ours) == str(theirs)


def test_graph_of_the_readme_of_torch_fx_prints_as_there() -> None:
    class MyModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.param = nn.Parameter(torch.rand(3, 4))
            self.linear = nn.Linear(4, 5)

        def forward(self, x):
            return self.linear(x + self.param).clamp(min=0.0, max=1.0)

    assert str(featx.symbolic_trace(MyModule()).graph) == "\n".join(
        [
            "graph():",
            "    %x : [num_users=1] = placeholder[target=x]",
            "    %param : [num_users=1] = get_attr[target=param]",
            "    %add : [num_users=1] = call_function[target=operator.add](args = (%x, %param), kwargs = {})",
            "    %linear : [num_users=1] = call_module[target=linear](args = (%add,), kwargs = {})",
            "    %clamp : [num_users=1] = call_method[target=clamp](args = (%linear,), kwargs = {min: 0.0, max: 1.0})",
            "    return clamp",
        ]
    )


def test_empty_graph_prints_as_with_torch_fx() -> None:
    theirs, ours = both(lambda graph: None)
    assert str(ours) == str(theirs)


def test_signature_is_collected_for_a_caller_that_asks() -> None:
    graph = featx.Graph()
    graph.output(graph.placeholder("x", type_expr=torch.Tensor), type_expr=torch.Tensor)
    parameters, result = ["self"], [""]
    lines = [node.format_node(parameters, result) for node in graph.nodes]
    assert (parameters, result, lines) == (["self", "x: torch.Tensor"], [" -> torch.Tensor"], [None, "return x"])


# What the package tabulate prints of these rows, written down from it: it leaves two more characters beside a heading.
LINEAR_TABLE = """\
opcode       name    target    args       kwargs
-----------  ------  --------  ---------  ------------------------
placeholder  x       x         ()         {}
call_module  linear  linear    (x,)       {}
call_method  clamp   clamp     (linear,)  {'min': 0.0, 'max': 1.0}
output       output  output    (clamp,)   {}
"""
OUTPUT_TABLE = """\
opcode    name    target    args    kwargs
--------  ------  --------  ------  --------
output    output  output    (1,)    {}
"""
FUNCTION_TABLE = """\
opcode         name    target                   args       kwargs
-------------  ------  -----------------------  ---------  --------
placeholder    x       x                        (None,)    {}
call_function  add     <built-in function add>  (x, [1])   {'k': x}
output         output  output                   ((add,),)  {}
"""
TENSOR_TABLE = """\
opcode       name    target    args                  kwargs
-----------  ------  --------  --------------------  --------
call_method  neg     neg       (tensor([[1., 0.],    {}
                                       [0., 1.]]),)
"""


def test_table_of_a_linear_model_is_that_of_tabulate(capsys: pytest.CaptureFixture[str]) -> None:
    graph = featx.Graph()
    linear = graph.call_module("linear", (graph.placeholder("x"),))
    graph.output(graph.call_method("clamp", (linear,), {"min": 0.0, "max": 1.0}))
    graph.print_tabular()
    assert capsys.readouterr().out == LINEAR_TABLE


def test_table_with_short_columns_is_that_of_tabulate(capsys: pytest.CaptureFixture[str]) -> None:
    graph = featx.Graph()
    graph.output(1)
    graph.print_tabular()
    assert capsys.readouterr().out == OUTPUT_TABLE


def test_table_of_a_function_call_is_that_of_tabulate(capsys: pytest.CaptureFixture[str]) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x", default_value=None)
    graph.output((graph.call_function(operator.add, (x, [1]), {"k": x}),))
    graph.print_tabular()
    assert capsys.readouterr().out == FUNCTION_TABLE


def test_table_with_an_argument_of_several_lines_is_that_of_tabulate(capsys: pytest.CaptureFixture[str]) -> None:
    graph = featx.Graph()
    graph.call_method("neg", (torch.eye(2),))
    graph.print_tabular()
    assert capsys.readouterr().out == TENSOR_TABLE


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) + x


def extractor_of(model: nn.Module, **options: Any) -> Any:
    return featx.create_feature_extractor(model, {"0.add": "first", "1.add": "last"}, **options)


@pytest.mark.parametrize(
    "trace",
    [
        lambda model: featx.trace(model, torch.ones(2)),
        lambda model: extractor_of(model, example_inputs=torch.ones(2)),
        lambda model: extractor_of(model, tracer="symbolic"),
    ],
    ids=["trace", "extractor", "symbolic extractor"],
)
def test_graph_and_code_say_how_to_ask_for_a_node_whose_name_does_not(trace: Callable[[nn.Module], Any]) -> None:
    traced = trace(nn.Sequential(Residual(), Residual()))
    for text in (str(traced.graph), traced.code):
        remarks = [line.rpartition("  # ")[::2] for line in text.split("\n") if "  # " in line]
        assert [remark for _, remark in remarks] == ["0.add", "1.add"]
        assert all("add" in line for line, _ in remarks)
    assert traced.graph["1.add"].name == "add_1"
    result = traced(torch.ones(2))
    assert torch.equal(result["last"] if isinstance(result, dict) else result, torch.full((2,), 4.0))


def test_texts_of_symbolic_traces_are_those_of_torch_fx() -> None:
    model = nn.Sequential(Residual(), Residual())
    ours, theirs = featx.symbolic_trace(model), torch.fx.symbolic_trace(model)
    assert (str(ours.graph), ours.code.strip()) == (str(theirs.graph), theirs.code.strip())
