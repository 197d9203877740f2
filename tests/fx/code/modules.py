"""Every documented member of torch.fx.GraphModule, symbolic_trace and wrap."""

import copy
import io
import math
import pickle
import tempfile

import torch
import torch.fx
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import GraphModule, symbolic_trace, wrap


def square(x):
    return x * x if x.sum() > 0 else x


wrap("square")
wrap("len")


@torch.fx.wrap
def root_of(x, n=2):
    return x.abs() ** (1 / n) if bool(x.sum() > 0) else x


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x, scale: float = 2.0, *, extra=None):
        return torch.relu(self.linear(x + self.shift) * scale)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = Head()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        x = self.body(x) * self.weight
        if self.training:
            x = x + 1
        return {"out": self.head(x), "mean": F.relu(x).mean(dim=-1, keepdim=True)}


def case_symbolic_trace():
    module = symbolic_trace(Model().eval())
    return str(module.graph), module(torch.ones(2, 4)), [name for name, _ in module.named_modules()]


def case_symbolic_trace_keeps_the_mode_of_training():
    module = symbolic_trace(Model().train())
    return str(module.graph), module.training


def case_symbolic_trace_of_a_function():
    def function(x, y=3):
        return torch.sin(x) + y

    module = symbolic_trace(function)
    return str(module.graph), module(torch.ones(2)), module(torch.ones(2), 4)


def case_concrete_args():
    def branching(x, flag):
        return x * 2 if flag else x + 2

    on, off = (symbolic_trace(branching, concrete_args={"flag": flag}) for flag in (True, False))
    return on(torch.ones(2), True), off(torch.ones(2), False)


def case_wrap():
    def function(x):
        return square(x) + root_of(x, n=3) + len(x)

    module = symbolic_trace(function)
    return str(module.graph), module(torch.full((2,), 8.0))


def case_functions_of_math_are_wrapped():
    def function(x):
        return x / math.sqrt(x.size(-1))

    module = symbolic_trace(function)
    return str(module.graph), module(torch.ones(4))


def case_control_flow_is_refused():
    def function(x):
        return x if x.sum() > 0 else -x

    try:
        symbolic_trace(function)
    except torch.fx.proxy.TraceError:
        return "refused"
    return "taken"


def case_from_a_module():
    model = Model().eval()
    graph = symbolic_trace(model).graph
    module = GraphModule(model, graph, class_name="Mine")
    return (
        module._get_name(), module(torch.ones(2, 4)), module.weight is model.weight, sorted(module.state_dict()),
        module.get_submodule("body.0") is model.body[0], hasattr(module.head, "unused"), module.graph is graph,
    )  # fmt: skip


def case_from_a_dict():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("deep.layer", (graph.call_function(torch.add, (x, graph.get_attr("deep.bias"))),)))
    module = GraphModule({"deep.layer": nn.ReLU(), "deep.bias": nn.Parameter(torch.ones(3))}, graph)
    return module(torch.tensor([-3.0, 0.0, 1.0])), [name for name, _ in module.named_parameters()]


def case_submodules():
    module = symbolic_trace(Model().eval())
    added = module.add_submodule("head.extra.deep", nn.Linear(2, 2)), module.add_submodule("weight.deep", nn.ReLU())
    deleted = module.delete_submodule("head.extra.deep"), module.delete_submodule("no.such")
    module.add_submodule("another", nn.ReLU())
    module.delete_all_unused_submodules()
    return added, deleted, sorted(name for name, _ in module.named_modules())


def case_graph_and_recompile():
    module = symbolic_trace(Model().eval())
    for node in module.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.sigmoid
    code = module.recompile()
    graph = copy.deepcopy(module.graph)
    edited = module(torch.ones(2, 4))
    for node in graph.nodes:
        if node.target is torch.sigmoid:
            node.target = torch.tanh
    module.graph = graph
    return edited, module(torch.ones(2, 4)), type(code).__name__, "sigmoid" in code.src, "tanh" in module.code


def case_copies():
    module = symbolic_trace(Model().eval())
    deep = copy.deepcopy(module)
    deep.weight.data.zero_()
    pickled = pickle.loads(pickle.dumps(module))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    x = torch.ones(2, 4)
    return module(x), deep(x), pickled(x), saved(x), str(pickled.graph)


def case_state_dict_goes_back():
    model = Model().eval()
    module = symbolic_trace(model)
    result = module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    return result.missing_keys, module(torch.ones(2, 4)), model(torch.ones(2, 4))


def case_to_folder():
    import importlib
    import sys
    import warnings

    warnings.simplefilter("ignore")
    module = symbolic_trace(Model().eval())
    with tempfile.TemporaryDirectory() as folder:
        name = "folder_of_" + torch.fx.__name__.replace(".", "_")
        module.to_folder(f"{folder}/{name}", "Restored")
        sys.path.insert(0, folder)
        try:
            restored = importlib.import_module(name).Restored()
        finally:
            sys.path.remove(folder)
        return restored.eval()(torch.ones(2, 4))


def case_print_readable():
    module = symbolic_trace(Model().eval())
    text = module.print_readable(print_output=False)
    return "class Model(torch.nn.Module)" in text, "self.head" in text or "head_linear" in text, "relu" in text


def case_is_a_module():
    module = symbolic_trace(Model().eval())
    module.get_submodule("body.0").requires_grad_(False)
    module.double()
    result = module(torch.ones(2, 4, dtype=torch.float64))
    result["out"].sum().backward()
    return isinstance(module, fx.GraphModule), isinstance(module, nn.Module), module.weight.grad, result


def case_meta():
    module = symbolic_trace(Model().eval())
    module.meta["note"] = 1
    return module.meta, copy.deepcopy(module).meta


def case_nested_graph_modules():
    inner = symbolic_trace(Head())
    outer = symbolic_trace(nn.Sequential(inner, nn.ReLU()))
    return str(outer.graph), outer(torch.ones(1, 4))


def case_errors_of_the_code_name_the_line():
    module = symbolic_trace(Model().eval())
    try:
        module(torch.ones(2, 5))
    except RuntimeError as error:
        import traceback

        return "body_0" in "".join(traceback.format_exception(error))
    return None
