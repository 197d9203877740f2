"""A quantizer in the manner of code bases on torch.fx: insert observers, calibrate, convert."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Tracer
from torch.fx.graph import Graph, Node, map_arg
from torch.fx.node import Argument


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        y = F.relu(self.conv(x))
        x = torch.add(x, y)
        return self.fc(torch.flatten(self.pool(x), 1))


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x):
        self.low.copy_(torch.minimum(self.low, x.detach().amin()))
        self.high.copy_(torch.maximum(self.high, x.detach().amax()))
        return x

    def parameters_of(self) -> tuple[float, int]:
        scale = float(max(self.high.item() - min(self.low.item(), 0.0), 1e-6)) / 255
        return scale, round(-min(self.low.item(), 0.0) / scale)


class QuantTracer(Tracer):
    def __init__(self, skipped: list[str]):
        super().__init__()
        self.skipped = skipped

    def is_leaf_module(self, m: nn.Module, qualname: str) -> bool:
        return qualname in self.skipped or super().is_leaf_module(m, qualname)


class Rule(NamedTuple):
    module_types: tuple[type, ...]
    functions: tuple[Callable, ...]


RULE = Rule((nn.Conv2d, nn.Linear), (torch.add, F.relu))


def needs_observer(node: Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], RULE.module_types)
    return node.op == "placeholder" or (node.op == "call_function" and node.target in RULE.functions)


def prepare(model: nn.Module) -> GraphModule:
    """Insert an observer after each node of the rule."""
    tracer = QuantTracer([])
    traced = GraphModule(copy.deepcopy(model), tracer.trace(model), "Prepared")
    modules = dict(traced.named_modules(remove_duplicate=False))
    new_graph, env = Graph(), {}  # type: Dict[str, Node]

    def load(argument: Argument) -> Any:
        return map_arg(argument, lambda node: env[node.name])

    for node in traced.graph.nodes:
        if node.op == "output":
            new_graph.output(load(node.args[0]))
            break
        env[node.name] = new_graph.node_copy(node, lambda n: env[n.name])
        if needs_observer(node, modules):
            name = f"{node.name}_observer"
            setattr(traced, name, Observer())
            env[node.name] = new_graph.call_module(name, (env[node.name],))
    return GraphModule(traced, new_graph, "Prepared")


def fake_quantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)


torch.fx.wrap("fake_quantize")


def convert(prepared: GraphModule) -> GraphModule:
    """Replace each observer by quantization with what it saw, and drop it."""
    converted = copy.deepcopy(prepared)
    for node in list(converted.graph.nodes):
        if node.op == "call_module" and isinstance(converted.get_submodule(node.target), Observer):
            scale, zero_point = converted.get_submodule(node.target).parameters_of()
            with converted.graph.inserting_before(node):
                quantized = converted.graph.call_function(fake_quantize, (node.args[0], scale, zero_point))
            node.replace_all_uses_with(quantized)
            converted.graph.erase_node(node)
    converted.delete_all_unused_submodules()
    converted.graph.lint()
    converted.recompile()
    return converted


def batches():
    torch.manual_seed(1)
    return [torch.rand(2, 3, 8, 8) for _ in range(3)]


def case_prepare():
    prepared = prepare(Net().eval())
    return str(prepared.graph), prepared(batches()[0])


def case_calibrate_and_convert():
    prepared = prepare(Net().eval())
    for batch in batches():
        prepared(batch)
    converted = convert(prepared)
    return str(converted.graph), converted(batches()[0]), [n for n, _ in converted.named_children()]


def case_scales():
    prepared = prepare(Net().eval())
    for batch in batches():
        prepared(batch)
    return {name: module.parameters_of() for name, module in prepared.named_children() if isinstance(module, Observer)}


def case_skipped_modules():
    tracer = QuantTracer(["stem"])
    return str(tracer.trace(Net()))


def case_input_observers():
    """Insert in front of inputs, with replace_input_with and inserting_before."""
    module = torch.fx.symbolic_trace(Net().eval())
    for node in list(module.graph.nodes):
        if node.op == "call_module" and isinstance(module.get_submodule(node.target), (nn.Conv2d, nn.Linear)):
            name = node.target.replace(".", "_") + "_input"
            module.add_submodule(name, Observer())
            with module.graph.inserting_before(node):
                observed = module.graph.create_node("call_module", name, args=(node.args[0],))
            node.replace_input_with(node.args[0], observed)
    module.recompile()
    return str(module.graph), module(batches()[0])


def case_weights_are_shared():
    model = Net().eval()
    module = torch.fx.symbolic_trace(model)
    nodes = {node.target: node for node in module.graph.nodes if node.op == "call_module"}
    quantized: nn.Module | None = nn.Linear(8, 4)
    with torch.no_grad():
        quantized.weight.copy_((model.fc.weight * 16).round() / 16)
        quantized.bias.copy_(model.fc.bias)
    module.add_submodule("fc_quantized", quantized)
    nodes["fc"].target = "fc_quantized"
    module.delete_submodule("fc")
    module.recompile()
    return module(batches()[0]), module.conv.weight is model.conv.weight, hasattr(module, "fc")
