"""The examples of the second seed notebook (in Chinese), with featx in place of torch.fx, and what they print."""

# ruff: noqa: T201 - the notebook prints

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import featx as fx
from featx import Graph, GraphModule, Node, Proxy, map_arg, symbolic_trace


class LinearAndClamp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.linear(x).clamp(min=0.0, max=1.0)


class AddsTwo(torch.nn.Module):
    def forward(self, x, y):  # type: ignore[no-untyped-def]
        return torch.add(x, y)


def replace_add_by_mul(m: torch.nn.Module, tracer_class: type = fx.Tracer) -> torch.nn.Module:
    graph: fx.Graph = tracer_class().trace(m)
    for node in graph.nodes:
        if node.op == "call_function" and node.target == torch.add:
            node.target = torch.mul
    graph.lint()
    return fx.GraphModule(m, graph)


def test_symbolic_trace_prints_graph_module_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    symbolic_traced: fx.GraphModule = symbolic_trace(LinearAndClamp())
    symbolic_traced._class_name = "MyModule"  # as the class is called in the notebook

    print(symbolic_traced.graph)
    assert capsys.readouterr().out == (
        "graph():\n"
        "    %x : [num_users=1] = placeholder[target=x]\n"
        "    %linear : [num_users=1] = call_module[target=linear](args = (%x,), kwargs = {})\n"
        "    %clamp : [num_users=1] = call_method[target=clamp](args = (%linear,), kwargs = {min: 0.0, max: 1.0})\n"
        "    return clamp\n"
    )

    print(symbolic_traced)
    assert capsys.readouterr().out == (
        "MyModule(\n"
        "  (linear): Linear(in_features=4, out_features=5, bias=True)\n"
        ")\n\n\n\n"
        "def forward(self, x):\n"
        "    linear = self.linear(x);  x = None\n"
        "    clamp = linear.clamp(min = 0.0, max = 1.0);  linear = None\n"
        "    return clamp\n"
        "    \n"
    )

    symbolic_traced.graph.print_tabular()
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "opcode       name    target    args       kwargs",
        "-----------  ------  --------  ---------  ------------------------",
        "placeholder  x       x         ()         {}",
        "call_module  linear  linear    (x,)       {}",
        "call_method  clamp   clamp     (linear,)  {'min': 0.0, 'max': 1.0}",
        "output       output  output    (clamp,)   {}",
    ]


def test_tracer_prints_the_graph_of_add_and_the_transformed_module(capsys: pytest.CaptureFixture[str]) -> None:
    m_add = AddsTwo()
    print(fx.Tracer().trace(m_add))
    assert capsys.readouterr().out == (
        "graph():\n"
        "    %x : [num_users=1] = placeholder[target=x]\n"
        "    %y : [num_users=1] = placeholder[target=y]\n"
        "    %add : [num_users=1] = call_function[target=torch.add](args = (%x, %y), kwargs = {})\n"
        "    return add\n"
    )

    print(replace_add_by_mul(m_add))
    assert capsys.readouterr().out == (
        "GraphModule()\n\n\n\n"
        "def forward(self, x, y):\n"
        "    add = torch.mul(x, y);  x = y = None\n"
        "    return add\n"
        "    \n"
    )


def test_deepcopy_of_a_node_as_an_argument_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    class M(torch.nn.Module):
        def forward(self, x, y):  # type: ignore[no-untyped-def]
            x = torch.add(x, y)
            x1 = torch.mul(x, 3)
            x2 = torch.mul(x, 2)
            return x1 * x2

    m_trace = fx.symbolic_trace(M())
    for node in m_trace.graph.nodes:
        if (node.op, node.target) == ("call_function", torch.add):
            with m_trace.graph.inserting_after(node):
                new_node = m_trace.graph.call_function(torch.relu, args=(deepcopy(node),))
                node.replace_all_uses_with(new_node)
    m_trace.recompile()
    print(m_trace)
    assert capsys.readouterr().out == (
        "M()\n\n\n\n"
        "def forward(self, x, y):\n"
        "    add = torch.add(x, y);  x = y = None\n"
        "    relu = torch.relu(add);  add = None\n"
        "    mul = torch.mul(relu, 3)\n"
        "    mul_1 = torch.mul(relu, 2);  relu = None\n"
        "    mul_2 = mul * mul_1;  mul = mul_1 = None\n"
        "    return mul_2\n"
        "    \n"
    )
    x, y = torch.tensor([1.0, -5.0]), torch.tensor([1.0, 1.0])
    assert torch.equal(m_trace(x, y), torch.tensor([24.0, 0.0]))


def test_graph_is_made_of_proxies_instead_of_tracing(capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph()
    tracer = fx.GraphAppendingTracer(graph)

    raw1 = graph.placeholder("x")
    raw2 = graph.placeholder("y")

    y = Proxy(raw1, tracer)
    z = Proxy(raw2, tracer)

    a = torch.cat([y, z])  # type: ignore[list-item]
    b = torch.tanh(a)
    c = torch.neg(b)
    torch.add(b, c)

    graph.output(c.node)  # type: ignore[attr-defined]
    print(GraphModule(torch.nn.Module(), graph))
    assert capsys.readouterr().out == (
        "GraphModule()\n\n\n\n"
        "def forward(self, x, y):\n"
        "    cat = torch.cat([x, y]);  x = y = None\n"
        "    tanh = torch.tanh(cat);  cat = None\n"
        "    neg = torch.neg(tanh)\n"
        # The notebook's torch did not free `add`, which nobody reads; torch.fx does since.
        "    add = torch.add(tanh, neg);  tanh = add = None\n"
        "    return neg\n"
        "    \n"
    )


def test_relu_is_decomposed_with_map_arg(capsys: pytest.CaptureFixture[str]) -> None:
    class M(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            x = torch.add(x, 2)
            return torch.relu(x)

    def relu_decomposition(x: Any) -> Any:
        print("my_relu:", x)
        return (x > 0) * x

    decomposition_rules = {torch.relu: relu_decomposition}

    def decompose(model: torch.nn.Module, tracer_class: type = fx.Tracer) -> torch.nn.Module:
        graph: fx.Graph = tracer_class().trace(model)
        new_graph = fx.Graph()
        env: dict[str, Any] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target in decomposition_rules:
                proxy_args = map_arg(node.args, lambda n: fx.Proxy(env[n.name]))
                output_proxy = decomposition_rules[node.target](*proxy_args)
                new_node = output_proxy.node
                env[node.name] = new_node
            else:
                new_node = new_graph.node_copy(node, lambda x: env[x.name])
                env[node.name] = new_node
        return fx.GraphModule(model, new_graph)

    m, inp = M(), torch.tensor([2])
    assert str(m(inp)) == "tensor([4])"
    m_new = decompose(m)
    print(m_new)
    assert capsys.readouterr().out == (
        "my_relu: Proxy(add)\n"
        "GraphModule()\n\n\n\n"
        "def forward(self, x):\n"
        "    add = torch.add(x, 2);  x = None\n"
        "    gt = add > 0\n"
        "    mul = gt * add;  gt = add = None\n"
        "    return mul\n"
        "    \n"
    )
    assert str(m_new(inp)) == "tensor([4])"
    assert capsys.readouterr().out == "", "forward does not print"


class ShapeProp:
    """Written by hand in the notebook: it sets attributes of its own on nodes."""

    def __init__(self, mod: torch.nn.Module) -> None:
        self.mod = mod
        self.graph = mod.graph
        self.modules = dict(self.mod.named_modules())

    def propagate(self, *args: Any) -> None:
        args_iter = iter(args)
        env: dict[str, Any] = {}

        def load_arg(a: Any) -> Any:
            return fx.map_arg(a, lambda n: env[n.name])

        def fetch_attr(target: str) -> Any:
            target_atoms = target.split(".")
            attr_itr = self.mod
            for i, atom in enumerate(target_atoms):
                if not hasattr(attr_itr, atom):
                    raise RuntimeError(f"Node referenced nonexistant target {'.'.join(target_atoms[:i])}")
                attr_itr = getattr(attr_itr, atom)
            return attr_itr

        for node in self.graph.nodes:
            if node.op == "placeholder":
                result = next(args_iter)
            elif node.op == "get_attr":
                result = fetch_attr(node.target)
            elif node.op == "call_function":
                result = node.target(*load_arg(node.args), **load_arg(node.kwargs))
            elif node.op == "call_method":
                self_obj, *args = load_arg(node.args)
                kwargs = load_arg(node.kwargs)
                result = getattr(self_obj, node.target)(*args, **kwargs)
            elif node.op == "call_module":
                result = self.modules[node.target](*load_arg(node.args), **load_arg(node.kwargs))

            if isinstance(result, torch.Tensor):
                node.shape = result.shape
                node.dtype = result.dtype

            env[node.name] = result

        for node in self.graph.nodes:
            print(node.name, node.shape, node.dtype)


def test_shape_propagation_written_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    ShapeProp(symbolic_trace(LinearAndClamp())).propagate(torch.randn(4))
    assert capsys.readouterr().out == (
        "x torch.Size([4]) torch.float32\n"
        "linear torch.Size([5]) torch.float32\n"
        "clamp torch.Size([5]) torch.float32\n"
        "output torch.Size([5]) torch.float32\n"
    )


def test_shapes_set_on_nodes_do_not_disturb_graph_or_code() -> None:
    traced = symbolic_trace(LinearAndClamp())
    before = (str(traced.graph), traced.code)
    ShapeProp(traced).propagate(torch.randn(4))
    assert (str(traced.graph), traced.code) == before
    assert all(isinstance(node, Node) for node in traced.graph.nodes)


@pytest.mark.slow
def test_c4_and_c5_of_resnet50(capsys: pytest.CaptureFixture[str]) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet50()
    train_nodes, eval_nodes = fx.get_graph_node_names(model)
    return_nodes = {"layer3.5.relu_2": "C4", "layer4.2.relu_2": "C5"}
    assert set(return_nodes) <= set(train_nodes) & set(eval_nodes)
    n_model = fx.create_feature_extractor(model, return_nodes)
    with torch.no_grad():
        out = n_model(torch.rand(1, 3, 224, 224))
    print([(k, v.shape) for k, v in out.items()])
    assert capsys.readouterr().out == ("[('C4', torch.Size([1, 1024, 14, 14])), ('C5', torch.Size([1, 2048, 7, 7]))]\n")
