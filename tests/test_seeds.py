"""The examples of the first seed notebook and of the draft of the documentation, with featx in place of torch.fx, and the results that are printed there.

Left out are those that need an interpreter, a transformer or a rewriter. Printed `#users` reads `num_users` since.
"""

# ruff: noqa: T201, E501 - the notebooks print, and print wide tables

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as the notebooks write it

import featx as fx
from featx import symbolic_trace


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x7cdddfe647e0", text)


def table(printed: str) -> list[str]:
    return [line.rstrip() for line in without_addresses(printed).splitlines()]


class MyModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param = torch.nn.Parameter(torch.rand(3, 4))
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.linear(x + self.param).clamp(min=0.0, max=1.0)


class TopK(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param = torch.nn.Parameter(torch.rand(3, 4))
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return torch.topk(torch.sum(self.linear(x + self.linear.weight).relu(), dim=-1), 3)


class AddsTwo(torch.nn.Module):
    def forward(self, x, y):  # type: ignore[no-untyped-def]
        return torch.add(x, y)


def test_three_components_print_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    symbolic_traced: fx.GraphModule = symbolic_trace(MyModule())
    print(symbolic_traced.graph)
    assert capsys.readouterr().out == (
        "graph():\n"
        "    %x : [num_users=1] = placeholder[target=x]\n"
        "    %param : [num_users=1] = get_attr[target=param]\n"
        "    %add : [num_users=1] = call_function[target=operator.add](args = (%x, %param), kwargs = {})\n"
        "    %linear : [num_users=1] = call_module[target=linear](args = (%add,), kwargs = {})\n"
        "    %clamp : [num_users=1] = call_method[target=clamp](args = (%linear,), kwargs = {min: 0.0, max: 1.0})\n"
        "    return clamp\n"
    )


def test_three_components_print_the_code() -> None:
    assert symbolic_trace(MyModule()).code == (
        "\n\n\n"
        "def forward(self, x):\n"
        "    param = self.param\n"
        "    add = x + param;  x = param = None\n"
        "    linear = self.linear(add);  add = None\n"
        "    clamp = linear.clamp(min = 0.0, max = 1.0);  linear = None\n"
        "    return clamp\n"
        "    "
    )


def test_transform_that_builds_a_new_graph() -> None:
    def transform(m: torch.nn.Module, tracer_class: type = fx.Tracer) -> torch.nn.Module:
        graph: fx.Graph = tracer_class().trace(m)
        for node in graph.nodes:
            if node.op == "call_module" and "linear" in node.target:
                with graph.inserting_before(node):
                    relu_node = graph.create_node("call_function", torch.relu, args=(node.args[0],))
                node.args = (relu_node,)
        return fx.GraphModule(m, graph)

    module, x = MyModule(), torch.randn(3, 4)
    expected = module.linear(torch.relu(x + module.param)).clamp(min=0.0, max=1.0)
    assert torch.equal(transform(module)(x), expected)


def test_transform_that_modifies_the_graph_in_place() -> None:
    def transform(m: torch.nn.Module) -> torch.nn.Module:
        gm: fx.GraphModule = fx.symbolic_trace(m)
        for node in gm.graph.nodes:
            if node.op == "call_module" and "linear" in node.target:
                with gm.graph.inserting_after(node):
                    pass
        gm.recompile()
        return gm

    module, x = MyModule(), torch.randn(3, 4)
    assert torch.equal(transform(module)(x), module(x))


def test_table_of_the_topk_example_without_the_package_tabulate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tabulate", None)
    gm = fx.symbolic_trace(TopK())
    gm.graph.print_tabular()
    assert table(capsys.readouterr().out) == [
        "opcode         name           target                                                   args                kwargs",
        "-------------  -------------  -------------------------------------------------------  ------------------  -----------",
        "placeholder    x              x                                                        ()                  {}",
        "get_attr       linear_weight  linear.weight                                            ()                  {}",
        "call_function  add            <built-in function add>                                  (x, linear_weight)  {}",
        "call_module    linear         linear                                                   (add,)              {}",
        "call_method    relu           relu                                                     (linear,)           {}",
        "call_function  sum_1          <built-in method sum of type object at 0x7cdddfe647e0>   (relu,)             {'dim': -1}",
        "call_function  topk           <built-in method topk of type object at 0x7cdddfe647e0>  (sum_1, 3)          {}",
        "output         output         output                                                   (topk,)             {}",
    ]


def test_tensor_literal_as_an_argument_and_recompile(capsys: pytest.CaptureFixture[str]) -> None:
    module = TopK()
    gm = fx.symbolic_trace(module)
    for node in gm.graph.nodes:
        if node.op == "call_module" and node.target == "linear":
            with gm.graph.inserting_before(node):
                const_node = gm.graph.create_node("call_function", torch.add, args=(node.args[0], torch.tensor(1.0)))
            node.args = (const_node,)

    gm.recompile()
    gm.graph.print_tabular()
    assert table(capsys.readouterr().out)[2:] == [
        "placeholder    x              x                                                        ()                  {}",
        "get_attr       linear_weight  linear.weight                                            ()                  {}",
        "call_function  add            <built-in function add>                                  (x, linear_weight)  {}",
        "call_function  add_1          <built-in method add of type object at 0x7cdddfe647e0>   (add, tensor(1.))   {}",
        "call_module    linear         linear                                                   (add_1,)            {}",
        "call_method    relu           relu                                                     (linear,)           {}",
        "call_function  sum_1          <built-in method sum of type object at 0x7cdddfe647e0>   (relu,)             {'dim': -1}",
        "call_function  topk           <built-in method topk of type object at 0x7cdddfe647e0>  (sum_1, 3)          {}",
        "output         output         output                                                   (topk,)             {}",
    ]
    x = torch.randn(5, 4)
    values, indices = gm(x)
    expected = torch.topk(module.linear(x + module.linear.weight + 1.0).relu().sum(dim=-1), 3)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


def replace_add_by_mul(m: torch.nn.Module, tracer_class: type = fx.Tracer) -> torch.nn.Module:
    graph: fx.Graph = tracer_class().trace(m)
    for node in graph.nodes:
        if node.op == "call_function" and node.target == torch.add:
            node.target = torch.mul
    graph.lint()
    return fx.GraphModule(m, graph)


def test_direct_graph_manipulation_replaces_add_by_mul(capsys: pytest.CaptureFixture[str]) -> None:
    transformed_module = replace_add_by_mul(AddsTwo())
    print(transformed_module(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])))
    assert capsys.readouterr().out == "tensor([ 4, 10, 18])\n"


def test_retracing_with_proxies_decomposes_relu(capsys: pytest.CaptureFixture[str]) -> None:
    def relu_decomposition(x: Any) -> Any:
        return (x > 0) * x

    decomposition_rules = {F.relu: relu_decomposition}

    def decompose(model: torch.nn.Module, tracer_class: type = fx.Tracer) -> torch.nn.Module:
        graph: fx.Graph = tracer_class().trace(model)
        new_graph = fx.Graph()
        env: dict[str, Any] = {}
        tracer = fx.GraphAppendingTracer(new_graph)

        for node in graph.nodes:
            if node.op == "call_function" and node.target in decomposition_rules:
                proxy_args = [fx.Proxy(env[x.name], tracer) if isinstance(x, fx.Node) else x for x in node.args]
                output_proxy = decomposition_rules[node.target](*proxy_args)
                new_node = output_proxy.node
                env[node.name] = new_node
            else:
                new_node = new_graph.node_copy(node, lambda x: env[x.name])
                env[node.name] = new_node

        return fx.GraphModule(model, new_graph)

    class M(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return F.relu(x)

    print(decompose(M())(torch.tensor([-1.0, 0.0, 1.0])))
    assert capsys.readouterr().out == "tensor([-0., 0., 1.])\n"


# -- the draft of the documentation ------------------------------------------------------------------------------------


def test_transform_of_the_draft_appends_a_relu() -> None:
    traced = fx.symbolic_trace(AddsTwo())
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target == torch.add:
            with traced.graph.inserting_after(node):
                new_node = traced.graph.call_function(torch.relu, args=(node,))
                node.replace_all_uses_with(new_node)
            new_node.args = (node,)
    traced.graph.lint()
    traced.recompile()
    assert torch.equal(traced(torch.tensor([-3.0, 1.0]), torch.tensor([1.0, 1.0])), torch.tensor([0.0, 2.0]))


def test_decomposition_of_the_draft_gives_proxies_no_tracer() -> None:
    decomposition_rules = {F.relu: lambda x: (x > 0) * x}
    model = fx.symbolic_trace(lambda x: F.relu(x) + 1)
    new_graph = fx.Graph()
    env: dict[str, Any] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target in decomposition_rules:
            proxy_args = [fx.Proxy(env[x.name]) if isinstance(x, fx.Node) else x for x in node.args]
            new_node = decomposition_rules[node.target](*proxy_args).node
            env[node.name] = new_node
        else:
            new_node = new_graph.node_copy(node, lambda x: env[x.name])
            env[node.name] = new_node
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(fx.GraphModule(model, new_graph)(x), F.relu(x) + 1)
