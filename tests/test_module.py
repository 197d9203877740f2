from __future__ import annotations

import copy
import gc
import inspect
import linecache
import operator
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import Graph, GraphModule, Node, create_feature_extractor, symbolic_trace
from featx.errors import ArgumentTypeError, GraphError, TargetError


class Model(nn.Module):
    """Holds one of each kind of state that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.plain = torch.rand(3)

    def forward(self, x: torch.Tensor):
        return functional.max_pool1d(self.block(x) * self.scale + self.offset + self.hidden + self.plain, 2)


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


def unary(function: Any = torch.neg, root: nn.Module | None = None) -> tuple[GraphModule, Node]:
    """Return a module that computes function(x), and the node that does."""
    graph = Graph()
    node = graph.call_function(function, (graph.placeholder("x"),))
    graph.output(node)
    return GraphModule(root or nn.Module(), graph), node


# -- building ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_module_computes_what_the_model_computes(training: bool) -> None:
    model = Model().train(training)
    traced = symbolic_trace(copy.deepcopy(model))
    assert traced.training is training
    assert torch.equal(traced(X), model(X))


def test_weights_are_shared_and_unused_ones_are_left_out() -> None:
    model = Model()
    traced = symbolic_trace(model)
    assert traced.get_submodule("block.0") is model.block[0]
    assert traced.scale is model.scale
    assert traced.offset is model.offset
    assert not hasattr(traced, "unused")


def test_state_dict_has_the_keys_of_the_model_and_loads_its_state() -> None:
    model, other = Model(), Model()
    traced = symbolic_trace(model)
    expected = [key for key in model.state_dict() if not key.startswith("unused")]
    assert sorted(traced.state_dict()) == sorted(expected)
    assert "hidden" not in traced.state_dict()
    traced.load_state_dict({key: other.state_dict()[key] for key in expected})
    assert torch.equal(model.scale, other.scale)


def test_kinds_of_tensors_stay_what_they_were() -> None:
    traced = symbolic_trace(Model())
    assert (list(traced._parameters), list(traced._buffers)) == (["scale"], ["offset", "hidden"])
    assert "plain" in traced.__dict__


def test_gradients_reach_the_model() -> None:
    model = Model()
    symbolic_trace(model)(X).sum().backward()
    assert model.scale.grad is not None
    assert model.block[0].weight.grad is not None


def test_module_follows_to_and_half() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    traced = symbolic_trace(model).to(torch.float64)
    assert traced(X.double()).dtype is torch.float64


def test_root_may_be_a_dict() -> None:
    linear, weight = nn.Linear(3, 3), torch.rand(3)
    graph = Graph()
    x = graph.call_module("layers.first", (graph.placeholder("x"),))
    graph.output(graph.call_function(operator.mul, (x, graph.get_attr("weights.w"))))
    module = GraphModule({"layers.first": linear, "weights.w": weight, "ignored": linear}, graph)
    assert torch.equal(module(X), linear(X) * weight)
    assert module.layers.first is linear
    assert sorted(module.state_dict()) == ["layers.first.bias", "layers.first.weight", "weights.w"]


def test_submodule_and_a_weight_below_it_are_shared_in_either_order() -> None:
    for order in (["call", "get"], ["get", "call"]):
        model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(3, 3))})
        graph = Graph()
        x = graph.placeholder("x")
        nodes = {}
        for kind in order:
            nodes[kind] = graph.call_module("block.0", (x,)) if kind == "call" else graph.get_attr("block.0.weight")
        graph.output((nodes["call"], nodes["get"]))
        result, weight = GraphModule(model, graph)(X)
        assert weight is model["block"][0].weight
        assert torch.equal(result, model["block"][0](X))


def test_plain_containers_on_the_way_keep_their_training_mode() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(nn.Dropout(0.9))})
    model["block"].eval()
    graph = Graph()
    graph.output(graph.call_module("block.0", (graph.placeholder("x"),)))
    module = GraphModule(model, graph)
    assert (module.training, module.block.training) == (True, False)
    assert module(X) is X


def test_class_name_is_what_repr_prints() -> None:
    module, _ = unary()
    assert repr(module) == "GraphModule()"
    assert repr(GraphModule(nn.Module(), module.graph, "Renamed")) == "Renamed()"
    assert repr(symbolic_trace(nn.Sequential(nn.ReLU()))) == "Sequential(\n  (0): ReLU()\n)"


@pytest.mark.parametrize(
    ("op", "target", "message"),
    [("call_module", "head", "'head' is missing in Model"), ("get_attr", "block.9", "'9' is missing in Sequential")],
)
def test_target_that_the_root_lacks_is_refused(op: str, target: str, message: str) -> None:
    graph = Graph()
    graph.create_node(op, target)
    with pytest.raises(TargetError, match=message):
        GraphModule(Model(), graph)
    with pytest.raises(TargetError, match=f"refers to '{target}', which is not a key of the root dict"):
        GraphModule({}, graph)


@pytest.mark.parametrize("name", ["graph", "code", "meta"])
def test_attribute_that_a_graph_module_has_itself_is_refused(name: str) -> None:
    model = nn.Module()
    model.register_buffer(name, torch.ones(1))
    graph = Graph()
    graph.output(graph.get_attr(name))
    with pytest.raises(TargetError, match=f"'{name}' of a GraphModule is something else; rename"):
        GraphModule(model, graph)


@pytest.mark.parametrize(
    ("root", "graph", "message"),
    [
        (nn.Module(), nn.Module(), "graph must be a featx Graph, got Module"),
        (5, Graph(), "root must be an nn.Module or a dict from target paths to modules and tensors, got int"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(root: Any, graph: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        GraphModule(root, graph)


# -- edits ------------------------------------------------------------------------------------------------------------


def change_target(module: GraphModule, node: Node) -> None:
    node.target = torch.abs


def change_args(module: GraphModule, node: Node) -> None:
    node.args = (torch.ones(2, 3),)


def change_kwargs(module: GraphModule, node: Node) -> None:
    node.kwargs = {"dim": 1}


def change_opcode(module: GraphModule, node: Node) -> None:
    node.op, node.target = "call_method", "exp"


def insert_a_node(module: GraphModule, node: Node) -> None:
    with module.graph.inserting_after(node):
        new = module.graph.call_function(torch.neg, (node,))
    node.replace_all_uses_with(new)


def erase_a_node(module: GraphModule, node: Node) -> None:
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)


def transform_the_code(module: GraphModule, node: Node) -> None:
    module.graph.on_generate_code(lambda _: lambda body: ["return 'transformed'\n", *body])


def assign_another_graph(module: GraphModule, node: Node) -> None:
    module.graph = unary(torch.abs)[0].graph


@pytest.mark.parametrize(
    "edit",
    [change_target, change_args, change_kwargs, change_opcode, insert_a_node, erase_a_node, transform_the_code,
     assign_another_graph],
)  # fmt: skip
def test_edit_that_nobody_recompiled_is_in_the_next_call(edit: Callable[[GraphModule, Node], None]) -> None:
    module, node = unary(torch.sum)
    stale = module(X)
    edit(module, node)
    result, code = module(X), module.code
    assert not (isinstance(result, torch.Tensor) and torch.equal(result, stale))
    module.recompile()
    again = module(X)
    assert result == again if isinstance(result, str) else torch.equal(result, again)
    assert module.code == code


def test_order_of_two_writes_is_that_of_the_graph() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    add, multiply = graph.call_method("add_", (x, 1)), graph.call_method("mul_", (x, 10))
    graph.output(x)
    module = GraphModule(nn.Module(), graph)
    assert module(torch.ones(1)).item() == 20
    multiply.append(add)
    assert module(torch.ones(1)).item() == 11


def test_edited_graph_runs_anew_in_every_module_that_holds_it() -> None:
    first, node = unary()
    second = GraphModule(nn.Module(), first.graph)
    node.target = torch.abs
    assert torch.equal(first(X), X.abs())
    assert torch.equal(second(X), X.abs())


def test_unchanged_graph_is_not_compiled_again() -> None:
    module, _ = unary()
    function = module.forward.__func__
    module(X)
    assert module.forward.__func__ is function
    assert module.forward.__self__ is module


def test_edit_that_cannot_run_raises_in_the_call_and_never_runs_old_code() -> None:
    module, node = unary()
    node.op, node.target = "call_module", "gone"
    for _ in range(2):
        with pytest.raises(GraphError, match=r"'neg' .call_module. refers to 'gone'"):
            module(X)
    node.op, node.target = "call_function", torch.abs
    assert torch.equal(module(X), X.abs())


def test_graph_that_cannot_run_is_refused_and_the_old_one_stays() -> None:
    module, node = unary()
    bad = Graph()
    bad.output(bad.call_module("gone"))
    for graph in (bad, "a graph"):
        with pytest.raises((TargetError, ArgumentTypeError)):
            module.graph = graph  # type: ignore[assignment]
    assert module.graph is node.graph
    assert module.graph.owning_module is module
    assert torch.equal(module(X), -X)


def test_function_put_over_forward_runs_until_the_next_edit() -> None:
    module, node = unary()
    module.forward = lambda x: "mine"  # type: ignore[method-assign]
    assert module(X) == "mine"
    node.target = torch.abs
    assert torch.equal(module(X), X.abs())


def test_code_transformer_of_a_with_statement_is_gone_after_it() -> None:
    module, _ = unary()
    with module.graph.on_generate_code(lambda _: lambda body: ["return 'transformed'\n", *body]):
        module.recompile()
        assert module(X) == "transformed"
    assert module(X) == "transformed"
    module.recompile()
    assert torch.equal(module(X), -X)


# -- the generated function -------------------------------------------------------------------------------------------


def test_traceback_shows_the_generated_line() -> None:
    module = symbolic_trace(Model())
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(2, 5))
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert 'block_0 = getattr(block, "0")(x);  x = None' in lines


def test_source_of_forward_is_the_code() -> None:
    module = symbolic_trace(Model())
    assert inspect.getsource(module.forward).strip() == module.code.strip()
    assert list(inspect.signature(module.forward).parameters) == ["x"]


def test_equal_code_has_one_linecache_entry_however_often_it_is_compiled() -> None:
    def count() -> int:
        return len([name for name in linecache.cache if name.startswith("<featx")])

    module, node = unary()
    before = count()
    for target in [torch.abs, torch.neg] * 5:
        node.target = target
        module(X)
        unary(target)[0](X)
    assert count() <= before + 1


@pytest.mark.slow
def test_dropped_module_frees_its_weights() -> None:
    module = symbolic_trace(Model())
    weight = weakref.ref(module.get_submodule("block.0").weight)
    del module
    gc.collect()
    assert weight() is None


# -- submodules -------------------------------------------------------------------------------------------------------


def test_submodule_is_added_at_a_path() -> None:
    module, _ = unary()
    relu = nn.ReLU()
    assert module.add_submodule("new.deep.relu", relu)
    assert module.get_submodule("new.deep.relu") is relu
    assert module.add_submodule("new.deep.relu", nn.Identity())
    assert type(module.new.deep.relu) is nn.Identity


@pytest.mark.parametrize("path", ["scale.inner", "scale", "offset"])
def test_submodule_is_not_added_where_a_tensor_is(path: str) -> None:
    module = symbolic_trace(Model())
    assert not module.add_submodule(path, nn.ReLU())
    assert isinstance(module.scale, nn.Parameter)


def test_submodule_is_deleted_at_a_path() -> None:
    module = symbolic_trace(Model())
    assert [module.delete_submodule(path) for path in ("block.2", "block.9", "scale", "no.such")] == [
        True,
        False,
        False,
        False,
    ]
    assert [name for name, _ in module.named_modules()] == ["", "block", "block.0", "block.1"]


def test_unused_submodules_are_deleted_and_used_ones_stay_whole() -> None:
    model = nn.ModuleDict(
        {
            "called": nn.Sequential(nn.Linear(3, 3)),
            "read": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
            "unused": nn.Sequential(nn.Linear(3, 3)),
        }
    )
    graph = Graph()
    x = graph.call_module("called", (graph.placeholder("x"),))
    graph.output((x, graph.get_attr("read.0.weight"), graph.call_module("unused", (x,))))
    module = GraphModule(model, graph)
    module.add_submodule("read.1", nn.ReLU())
    output = graph.output_node()
    unused = output.args[0][2]
    output.args = (output.args[0][:2],)
    graph.erase_node(unused)
    module.delete_all_unused_submodules()
    assert [name for name, _ in module.named_modules()] == ["", "called", "called.0", "read", "read.0"]
    assert torch.equal(module(X)[0], model["called"](X))
    assert "unused" in model


# -- text -------------------------------------------------------------------------------------------------------------


def test_module_prints_its_submodules_and_its_code() -> None:
    module = symbolic_trace(nn.Sequential(nn.ReLU()))
    assert str(module) == f"Sequential(\n  (0): ReLU()\n)\n{module.code}"


READABLE = """\
class Outer(torch.nn.Module):



    def forward(self, x):
        inner = self.inner(x);  x = None
        return inner

    class Inner(torch.nn.Module):



        def forward(self, x):
            neg = torch.neg(x);  x = None
            return neg
"""


def test_readable_code_shows_graph_modules_inside(capsys: pytest.CaptureFixture[str]) -> None:
    root = nn.Module()
    root.inner = GraphModule(nn.Module(), unary()[0].graph, "Inner")
    graph = Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    module = GraphModule(root, graph, "Outer")
    text = module.print_readable()
    assert capsys.readouterr().out == text + "\n"
    assert [line for line in text.split("\n") if line.strip()] == [line for line in READABLE.split("\n") if line]
    assert module.print_readable(print_output=False) == text
    assert capsys.readouterr().out == ""


def test_torchscript_does_not_run_the_code_of_another_module() -> None:
    double, square = symbolic_trace(lambda x: x + x), symbolic_trace(lambda x: x * x)
    scripted = [torch.jit.script(module) for module in (double, square, square)]
    assert [module(torch.tensor(3.0)).item() for module in scripted] == [6.0, 9.0, 9.0]


def test_torchscript_takes_a_module() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.scale = nn.Parameter(torch.rand(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x) * self.scale
            y += x
            return torch.cat([y, x.view(x.size(0), -1)], dim=1)

    module = symbolic_trace(Residual())
    x = torch.rand(3, 2)
    assert torch.equal(torch.jit.script(module)(x), module(x))
    extractor = create_feature_extractor(Residual(), ["body.0", "add"], tracer="symbolic")
    scripted = torch.jit.script(extractor)(x)
    assert {name: torch.equal(value, scripted[name]) for name, value in extractor(x).items()} == {
        "body.0": True,
        "add": True,
    }


@pytest.mark.parametrize(
    "path", ["__class__", "__dict__", "forward", "_modules", "_parameters", "", "a..b", ".a", "a."]
)
def test_path_that_is_something_else_of_a_graph_module_is_refused(path: str) -> None:
    graph = Graph()
    graph.output(graph.get_attr(path))
    model = nn.Module()
    setattr(model, path.partition(".")[0] or "other", nn.Module()) if not path.startswith(("_", "f")) else None
    with pytest.raises(TargetError):
        GraphModule(model, graph)


@pytest.mark.parametrize("name", ["forward", "train", "__dict__", "_modules", "training"])
@pytest.mark.parametrize("is_dict", [False, True])
def test_module_that_reading_the_attribute_does_not_give_is_refused(name: str, is_dict: bool) -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner._modules[name] = nn.ReLU()
    graph = Graph()
    graph.output(graph.call_module(f"inner.{name}", (graph.placeholder("x"),)))
    with pytest.raises(TargetError, match=f"'{name}' of every nn.Module is something else"):
        GraphModule({f"inner.{name}": nn.ReLU()} if is_dict else model, graph)


def test_module_inside_one_that_is_called_whole_is_refused_likewise() -> None:
    model = nn.Module()
    model.inner = nn.Sequential()
    model.inner._modules["forward"] = nn.ReLU()
    graph = Graph()
    x = graph.call_module("inner", (graph.placeholder("x"),))
    graph.output(graph.call_module("inner.forward", (x,)))
    with pytest.raises(TargetError, match=r"'forward' of every nn\.Module is something else"):
        GraphModule(model, graph)


def test_a_notebook_shows_modules_and_code_folded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    shown = symbolic_trace(lambda x: x < 1)._repr_html_()
    assert shown.startswith("<pre>&lt;lambda&gt;, 3 nodes</pre><details>")
    assert "lt = x &lt; 1" in shown
    extractor = create_feature_extractor(model, {"0": "first"}, example_inputs=(torch.rand(2, 4),))
    heading, *folded = extractor._repr_html_().split("<details>")
    assert heading.split()[:2] == ["<pre>key", "node"]
    assert "first" in heading
    assert len(folded) == 2
