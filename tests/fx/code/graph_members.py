"""Every documented member of torch.fx.Graph."""

import copy
import operator

import torch
import torch.fx
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x, bias=None):
        hidden = self.linear(x).relu()
        return torch.cat([hidden * self.scale, hidden.clamp(min=0.0)], dim=1)


def small():
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y", type_expr=torch.Tensor, default_value=2.0)
    total = graph.call_function(operator.add, (x, y))
    relu = graph.call_method("relu", (total,))
    graph.output(relu)
    return graph


def case_create_and_print():
    graph = small()
    graph.lint()
    return str(graph), [(n.op, n.name, n.target, n.args, n.kwargs, n.type) for n in graph.nodes]


def case_create_node_names():
    graph = Graph()
    made = [
        graph.create_node("placeholder", "input"),
        graph.create_node("placeholder", "a", name="a.b"),
        graph.create_node("call_function", torch.relu, (), {}, name="relu"),
        graph.create_node("call_function", torch.relu, name="relu"),
        graph.create_node("call_method", "__add__"),
        graph.create_node("call_module", "layer1.0.conv"),
        graph.create_node("get_attr", "layer1.0.weight", type_expr=torch.Tensor),
        graph.create_node("call_function", nn.functional.max_pool2d),
    ]
    return [(n.name, n.type) for n in made]


def case_get_attr_and_call_module():
    model = Block()
    graph = Graph()
    x = graph.placeholder("x")
    scale = graph.get_attr("scale")
    hidden = graph.call_module("linear", (x,))
    graph.output((graph.call_function(torch.mul, (hidden, scale)), {"hidden": hidden}))
    module = GraphModule(model, graph)
    return module(torch.ones(2, 4)), module.code


def case_graph_copy():
    source, graph = small(), Graph()
    mapping = {}
    result = graph.graph_copy(source, mapping)
    graph.output(result)
    return str(graph), [(a.name, b.name) for a, b in mapping.items()], result.name


def case_graph_copy_with_output_node():
    source, graph = small(), Graph()
    result, output = graph.graph_copy(source, {}, return_output_node=True)
    return result.name, output.name


def case_node_copy():
    source, graph = small(), Graph()
    env = {}
    for node in source.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    return str(graph)


def case_erase_node():
    graph = small()
    node = next(n for n in graph.nodes if n.op == "call_method")
    try:
        graph.erase_node(node)
    except RuntimeError:
        refused = True
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    graph.lint()
    return refused, str(graph)


def case_eliminate_dead_code():
    graph = small()
    first = next(iter(graph.nodes))
    with graph.inserting_after(first):
        graph.call_function(torch.neg, (first,))
    changed = graph.eliminate_dead_code()
    again = graph.eliminate_dead_code()
    return changed, again, str(graph)


def case_eliminate_dead_code_with_own_rule():
    graph = small()
    first = next(iter(graph.nodes))
    with graph.inserting_after(first):
        graph.call_function(torch.neg, (first,))
        graph.call_function(torch.abs, (first,))

    def is_impure(node):
        return node.op in {"placeholder", "output"} or node.target is torch.neg

    return graph.eliminate_dead_code(is_impure), str(graph)


def case_find_nodes():
    graph = symbolic_trace(Block()).graph
    return (
        graph.find_nodes(op="placeholder"),
        graph.find_nodes(op="call_module", target="linear"),
        graph.find_nodes(op="call_function", target=operator.mul),
        graph.find_nodes(op="call_method", sort=False),
        graph.find_nodes(op="call_function", target=torch.sin),
    )


def case_inserting():
    graph = small()
    x, y, total, relu, output = graph.nodes
    with graph.inserting_before(total):
        graph.call_function(torch.sin, (x,))
        graph.call_function(torch.cos, (x,))
    with graph.inserting_after(relu):
        graph.call_function(torch.exp, (relu,))
        graph.call_function(torch.log, (relu,))
    graph.inserting_before(output)
    graph.call_function(torch.tan, (y,))
    graph.lint()
    return str(graph)


def case_lint_refuses():
    graph = small()
    x, y, total, relu, output = graph.nodes
    x.append(relu)
    try:
        graph.lint()
    except RuntimeError:
        return "refused"
    return "taken"


def case_nodes():
    graph = small()
    nodes = graph.nodes
    return len(nodes), [n.name for n in nodes], [n.name for n in reversed(nodes)], next(iter(nodes)).name


def case_output_node():
    graph = small()
    return graph.output_node().name, graph.output_node().args


def case_on_generate_code():
    module = symbolic_trace(Block())

    def insert(body):
        return ["x = x + 1\n", *body]

    module.graph.on_generate_code(lambda _: insert)
    module.recompile()
    return module(torch.ones(2, 4)), "x = x + 1" in module.code


def case_on_generate_code_for_a_while():
    module = symbolic_trace(Block())
    with module.graph.on_generate_code(
        lambda earlier: lambda body: ["x = x * 2\n", *(earlier(body) if earlier else body)]
    ):
        module.recompile()
        inside = module(torch.ones(2, 4))
    module.recompile()
    return inside, module(torch.ones(2, 4))


def case_python_code():
    code = small().python_code("self")
    space = dict(code.globals)
    exec(code.src, space)
    return space["forward"](None, torch.tensor([-1.0, 5.0])), "def forward(self, x" in code.src


def case_process_inputs_and_outputs():
    graph = small()
    return graph.process_inputs(1, 2), graph.process_outputs((3, 4))


def case_deepcopy():
    graph = small()
    next(iter(graph.nodes)).meta["note"] = [1]
    twin = copy.deepcopy(graph)
    next(iter(twin.nodes)).meta["note"].append(2)
    return str(twin), next(iter(graph.nodes)).meta["note"], next(iter(twin.nodes)).meta["note"]


def case_owning_module():
    module = symbolic_trace(Block())
    return module.graph.owning_module is module, Graph().owning_module


def case_tracer_cls():
    class Own(torch.fx.Tracer):
        pass

    graph = Own().trace(Block())
    return GraphModule(Block(), graph)(torch.ones(1, 4))
