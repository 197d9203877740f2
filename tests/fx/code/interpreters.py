"""Every documented member of torch.fx.Interpreter and torch.fx.Transformer, as subclasses in code bases use them."""

import time
import traceback
from collections import defaultdict
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import GraphModule, Interpreter, Node, Transformer
from torch.fx.node import Argument, Target, map_aggregate
from torch.fx.traceback import preserve_node_meta


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 2))
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, offset=1.0):
        x = torch.relu(self.norm(self.conv(x)))
        x = self.drop(x).add(offset) * self.gain
        return self.head(x), x.sigmoid().mean()


def traced():
    return torch.fx.symbolic_trace(Model().eval())


def image():
    torch.manual_seed(1)
    return torch.rand(2, 3, 8, 8)


def case_run():
    interpreter = Interpreter(traced())
    return interpreter.run(image()), interpreter.run(image(), 3.0), list(interpreter.env)


def case_run_without_collecting_garbage():
    interpreter = Interpreter(traced(), garbage_collect_values=False)
    interpreter.run(image())
    return [(node.name, value) for node, value in interpreter.env.items()]


def case_run_from_an_environment():
    module = traced()
    conv = next(node for node in module.graph.nodes if node.op == "call_module")
    env = {conv: torch.ones(2, 4, 6, 6)}
    return Interpreter(module).run(image(), 1.0, initial_env=dict(env))


def case_boxed_run():
    inputs = [image(), 2.0]
    return Interpreter(traced()).boxed_run(inputs), inputs


def case_graph_argument():
    module, other = traced(), traced()
    for node in other.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
    return Interpreter(module, graph=other.graph).run(image())


def case_members():
    module = traced()
    interpreter = Interpreter(module)
    return (
        interpreter.module is module, interpreter.graph is module.graph, sorted(interpreter.submodules),
        interpreter.fetch_attr("gain"), interpreter.name, interpreter.extra_traceback,
    )  # fmt: skip


class Profiler(Interpreter):
    """Measures how long each node takes."""

    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.runtimes: dict[Node, list[float]] = defaultdict(list)
        self.total: list[float] = []

    def run(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = super().run(*args)
        self.total.append(time.perf_counter() - start)
        return result

    def run_node(self, n: Node) -> Any:
        start = time.perf_counter()
        value = super().run_node(n)
        self.runtimes[n].append(time.perf_counter() - start)
        return value

    def summary(self) -> list[tuple[str, str, int]]:
        return [(n.op, n.name, len(times)) for n, times in self.runtimes.items() if sum(times) >= 0.0]


def case_profiler():
    profiler = Profiler(traced())
    profiler.run(image())
    profiler.run(image())
    return profiler.summary(), len(profiler.total)


class Shapes(Interpreter):
    """Writes shape and dtype of each value into the meta of its node."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        n.meta["form"] = map_aggregate(
            result, lambda v: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v
        )
        return result


def case_shapes():
    module = traced()
    Shapes(module).run(image())
    return [(node.name, node.meta["form"]) for node in module.graph.nodes]


class Swapper(Interpreter):
    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.relu:
            return torch.neg(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if target == "sigmoid":
            receiver, *rest = args
            return receiver.tanh(*rest, **kwargs)
        return super().call_method(target, args, kwargs)


def case_swapped_operations():
    return Swapper(traced()).run(image())


class Recorder(Interpreter):
    """Notes which of the six methods run, and with what."""

    def __init__(self, module):
        super().__init__(module)
        self.calls = []

    def placeholder(self, target, args, kwargs):
        self.calls.append(("placeholder", target, args))
        return super().placeholder(target, args, kwargs)

    def get_attr(self, target, args, kwargs):
        self.calls.append(("get_attr", target))
        return super().get_attr(target, args, kwargs)

    def call_module(self, target, args, kwargs):
        self.calls.append(("call_module", target, type(self.fetch_attr(target)).__name__, len(args)))
        return super().call_module(target, args, kwargs)

    def output(self, target, args, kwargs):
        self.calls.append(("output", target, len(args[0])))
        return super().output(target, args, kwargs)

    def run_node(self, n):
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.calls.append((n.name, len(args), sorted(kwargs)))
        return super().run_node(n)


def case_methods():
    recorder = Recorder(traced())
    recorder.run(image())
    return recorder.calls


def case_map_nodes_to_values():
    module = traced()
    interpreter = Interpreter(module)
    x = next(iter(module.graph.nodes))
    interpreter.env[x] = 3
    return interpreter.map_nodes_to_values((x, [x, 1], {"k": x}), x)


def case_errors_name_the_node():
    try:
        Interpreter(traced()).run(torch.rand(2, 3, 9, 9))
    except RuntimeError as error:
        return "head_1" in "".join(traceback.format_exception(error))
    return None


class DropoutRemover(Transformer):
    def call_module(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.submodules[target], nn.Dropout):
            assert len(args) == 1
            return args[0]
        return super().call_module(target, args, kwargs)


def case_dropout_remover():
    module = DropoutRemover(traced()).transform()
    return str(module.graph), module(image()), [name for name, _ in module.named_children()], module.gain


class NegSigmoid(Transformer):
    def call_function(self, target, args, kwargs):
        if target is torch.relu:
            return torch.sigmoid(*args, **kwargs).neg()
        return super().call_function(target, args, kwargs)

    def call_method(self, target, args, kwargs):
        return super().call_method({"sigmoid": "tanh"}.get(target, target), args, kwargs)

    def get_attr(self, target, args, kwargs):
        return super().get_attr(target, args, kwargs) + 1

    def placeholder(self, target, args, kwargs):
        return super().placeholder(target, args, kwargs)


def case_transformer():
    module = NegSigmoid(traced()).transform()
    return [(n.op, n.target) for n in module.graph.nodes], module(image())


def case_identity_transformer():
    module = traced()
    for number, node in enumerate(module.graph.nodes):
        node.meta["custom"] = {"number": number}
    with preserve_node_meta():
        new = Transformer(module).transform()
    # torch.fx calls the output "output_1" and gives it and the inputs no meta here.
    calls = [n for n in new.graph.nodes if n.op.startswith("call_")]
    return [(n.op, n.name, n.target, n.meta["custom"]) for n in calls], new(image())
