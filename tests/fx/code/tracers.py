"""Every documented member of torch.fx.Tracer and torch.fx.Proxy, as subclasses in code bases use them."""

import dataclasses
import operator

import torch
import torch.fx
from torch import nn
from torch.fx import Graph, GraphModule, Node, Proxy, ProxyableClassMeta, Tracer
from torch.fx._symbolic_trace import is_fx_symbolic_tracing, is_fx_tracing
from torch.fx.graph import inplace_methods, magic_methods, reflectable_magic_methods
from torch.fx.proxy import Attribute, GraphAppendingTracer, ParameterProxy, Scope, TraceError, TracerBase


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return self.norm(torch.softmax(scores / x.shape[-1] ** 0.5, dim=-1) @ x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.register_buffer("mask", torch.ones(4))
        self.gain = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        x = x + self.attention(x) * self.mask
        return self.mlp(x) * self.gain


class LeafTracer(Tracer):
    def __init__(self, leaves, **kwargs):
        super().__init__(**kwargs)
        self.leaves = leaves
        self.seen = []

    def is_leaf_module(self, m, module_qualified_name):
        self.seen.append(module_qualified_name)
        return isinstance(m, self.leaves) or super().is_leaf_module(m, module_qualified_name)


def case_is_leaf_module():
    tracer = LeafTracer((Attention,))
    model = Block()
    graph = tracer.trace(model)
    return str(graph), tracer.seen, GraphModule(tracer.root, graph)(torch.ones(2, 3, 4)), tracer.root is model


def case_path_of_module_and_call_module():
    class Recorder(Tracer):
        def __init__(self):
            super().__init__()
            self.calls = []

        def call_module(self, m, forward, args, kwargs):
            self.calls.append((self.path_of_module(m), type(m).__name__, len(args), list(kwargs)))
            return super().call_module(m, forward, args, kwargs)

    tracer = Recorder()
    tracer.trace(Block())
    return tracer.calls


def case_scopes():
    tracer = Tracer()
    tracer.trace(Block())
    return dict(tracer.node_name_to_scope), tracer.scope.module_path


def case_scope_while_tracing():
    class Scoped(Tracer):
        def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, proxy_factory_fn=None):
            proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
            proxy.node.meta["path"] = self.scope.module_path
            proxy.node.meta["types"] = [kind.__name__ for _, kind in self.module_stack.values()]
            return proxy

    graph = Scoped().trace(Block())
    return [(node.name, node.meta.get("path"), node.meta.get("types")) for node in graph.nodes if node.op != "output"]


def case_nn_module_stack():
    graph = Tracer().trace(Block())
    return [
        (node.name, list(node.meta.get("nn_module_stack", ()))) for node in graph.nodes if node.op.startswith("call_")
    ]


def case_create_node():
    class Prefixed(Tracer):
        def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
            node = super().create_node(kind, target, args, kwargs, name, type_expr)
            node.tag = f"{kind}:{node.name}"
            return node

    return [node.tag for node in Prefixed().trace(Block()).nodes]


def case_create_arg():
    class Box:
        def __init__(self, value):
            self.value = value

    class Unboxing(Tracer):
        def create_arg(self, a):
            if isinstance(a, Box):
                return super().create_arg(a.value)
            return super().create_arg(a)

    class Call(nn.Module):
        def forward(self, x):
            return x.mul(Box(2))

    tracer = Unboxing()
    graph = tracer.trace(Call())
    return str(graph), GraphModule(tracer.root, graph)(torch.ones(2))


@dataclasses.dataclass
class Pair2:
    first: torch.Tensor
    second: int


@torch.fx.wrap
def use(pair):
    return pair.first * pair.second


def case_create_args_for_dataclasses():
    class Model(nn.Module):
        def forward(self, x):
            pair = use(Pair2(x, second=2))
            return pair, torch.stack([x, x], dim=0), (x, {"a": x, "b": slice(x, None)}, [1, 2.0, None, torch.float32])

    return str(Tracer().trace(Model()))


def case_proxy():
    class Tagged(Proxy):
        pass

    class Own(Tracer):
        def proxy(self, node):
            return Tagged(node, self)

    found = []

    def function(x):
        y = x + 1
        found.append(type(y).__name__)
        return y

    Own().trace(function)
    return found


def case_getattr():
    class Reading(Tracer):
        def __init__(self):
            super().__init__()
            self.read = []

        def getattr(self, attr, attr_val, parameter_proxy_cache):
            if isinstance(attr_val, nn.Parameter):
                self.read.append(attr)
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    tracer = Reading()
    tracer.trace(Block())
    return tracer.read


def case_to_bool():
    class Answering(Tracer):
        def to_bool(self, obj):
            return True

    return str(Answering().trace(lambda x: x * 2 if x.sum() > 0 else x))


def case_iter_and_keys():
    class Unrolling(Tracer):
        def iter(self, obj):
            return iter([obj[0], obj[1]])

        def keys(self, obj):
            return ["a", "b"]

    def function(x, options):
        total = sum([part for part in x])
        return total, dict(**options)

    return str(Unrolling().trace(function))


def case_proxy_buffer_attributes():
    class Buffers(Tracer):
        proxy_buffer_attributes = True

    return str(Buffers().trace(Block()))


def case_param_shapes_constant():
    class Shapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, 4))

        def forward(self, x):
            return x if self.weight.shape[0] < 4 else -x

    return str(Tracer(param_shapes_constant=True).trace(Shapes()))


def case_autowrap():
    graph = Tracer(autowrap_functions=(helper,)).trace(calls_helper)
    return str(graph)


def helper(x):
    return x if x.sum() > 0 else -x


def calls_helper(x):
    return helper(x) + 1


def case_traced_func_name():
    class Other(nn.Module):
        def forward(self, x):
            return x

        def features(self, x):
            return x + 1

    tracer = Tracer()
    tracer.traced_func_name = "features"
    return str(tracer.trace(Other()))


def case_refusals():
    refused = []
    for function in (
        lambda x: x if x else 1,
        lambda x: [y for y in x],
        lambda x: x + range(x),
        lambda x: {**x, "a": 1},
    ):
        try:
            Tracer().trace(function)
            refused.append("taken")
        except (TraceError, TypeError):
            refused.append("refused")
    return refused


def case_module_that_is_not_registered():
    hidden = [nn.Linear(2, 2)]

    class Model(nn.Module):
        def forward(self, x):
            return hidden[0](x)

    try:
        Tracer().trace(Model())
    except NameError:
        return "refused"
    return "taken"


def case_proxies_append_to_a_graph():
    graph = Graph()
    x = Proxy(graph.placeholder("x"))
    y = torch.relu(x.view(2, -1)[0, ..., None]) @ 3.0
    z = -((1 - y) ** 2) >= y.shape[0]
    graph.output((z.node, x.size(0).node))
    return str(graph), repr(y), isinstance(y.tracer, GraphAppendingTracer), isinstance(x.shape, Attribute)


def case_operators():
    graph = Graph()
    x = Proxy(graph.placeholder("x"))
    for name in sorted(magic_methods):
        function = getattr(operator, {"div": "truediv"}.get(name, name))
        function(x) if name in ("pos", "neg", "invert") else function(x, 2)
        if name in reflectable_magic_methods and name not in ("getitem",):
            function(2, x)
    return str(graph)


def case_tables_of_operators():
    return sorted(magic_methods.items()), sorted(reflectable_magic_methods.items()), sorted(inplace_methods.items())


def case_decomposition_by_retracing():
    def decompose_relu(x):
        return (x > 0) * x

    rules = {torch.relu: decompose_relu}

    def function(x):
        return torch.relu(x) + torch.sin(torch.relu(x * 2))

    graph = torch.fx.symbolic_trace(function).graph
    new_graph, env = Graph(), {}
    tracer = GraphAppendingTracer(new_graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in rules:
            args = [Proxy(env[arg], tracer) if isinstance(arg, Node) else arg for arg in node.args]
            env[node] = rules[node.target](*args).node
        else:
            env[node] = new_graph.node_copy(node, lambda n: env[n])
    return str(new_graph), GraphModule(nn.Module(), new_graph)(torch.tensor([-1.0, 2.0]))


class Pair(metaclass=ProxyableClassMeta):
    def __init__(self, left, right):
        self.left, self.right = left, right

    def add(self):
        return self.left + self.right


def case_proxyable_class():
    def function(x, y):
        return Pair(x, [y, 2]).add() + Pair(1, 2).add()

    def plain(x, y):
        return Pair(x, y).add() * Pair(1, 2).add()

    module = torch.fx.symbolic_trace(plain)
    return str(torch.fx.symbolic_trace(function).graph), module(torch.ones(2), torch.ones(2)), type(Pair(1, 2)).__name__


def case_is_tracing():
    seen = []

    def function(x):
        seen.append((is_fx_tracing(), is_fx_symbolic_tracing()))
        return x

    torch.fx.symbolic_trace(function)
    return seen, is_fx_tracing()


def case_names_of_the_module():
    return [kind.__name__ for kind in (Attribute, ParameterProxy, Scope, TracerBase, TraceError)], Scope(
        "a", nn.ReLU
    ).module_path
