"""to_torch_fx and from_torch_fx: modules, their state, meta, modes, and what is refused."""

from __future__ import annotations

import copy
import operator
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

import featx

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


class Config:
    scale = torch.tensor(3.0)
    factor = 2


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.scale + self.offset + self.hidden + self.plain


# -- what a module holds -----------------------------------------------------------------------------------------------


def test_state_is_shared_in_both_directions() -> None:
    model = Model()
    module = featx.symbolic_trace(model)
    converted = featx.to_torch_fx(module)
    back = featx.from_torch_fx(converted)
    for one in (converted, back):
        assert one.get_submodule("block.0") is model.block[0]
        assert one.block is not model.block
        assert one.scale is model.scale
        assert one.offset is model.offset
        assert not hasattr(one, "unused")
        assert sorted(one.state_dict()) == sorted(module.state_dict())
        assert (list(one._parameters), list(one._buffers)) == (["scale"], ["offset", "hidden"])
        assert one.__dict__["plain"] is model.plain
        assert type(one).__name__ == "Model" or one._get_name() == "Model"


def test_what_is_deleted_or_added_afterwards_is_the_copys_own() -> None:
    module = featx.symbolic_trace(Model())
    converted = featx.to_torch_fx(module)
    converted.delete_submodule("block.0")
    converted.add_submodule("block.9", nn.ReLU())
    converted.register_buffer("new", torch.ones(1))
    assert list(module.block._modules) == ["0", "1", "2"]
    assert "new" not in module._buffers


@pytest.mark.parametrize("training", [True, False])
def test_modes_of_all_submodules_stay(training: bool) -> None:
    model = Model().train(training)
    model.block[1].train(not training)
    converted = featx.to_torch_fx(featx.symbolic_trace(model))
    for one in (converted, featx.from_torch_fx(converted)):
        assert {path: part.training for path, part in one.named_modules()} == {
            path: part.training for path, part in model.named_modules() if path != "unused"
        }


def test_path_through_a_plain_object_is_read_from_that_object() -> None:
    model = nn.Module()
    model.config = Config()
    graph = featx.Graph()
    x = graph.placeholder("x")
    scaled = graph.call_function(operator.mul, (x, graph.get_attr("config.scale")))
    graph.output(graph.call_function(operator.mul, (scaled, graph.get_attr("config.factor"))))
    converted = featx.to_torch_fx(featx.GraphModule(model, graph))
    for one in (converted, featx.from_torch_fx(converted)):
        assert one.config is model.config
        assert torch.equal(one(X), X * 6)


def test_module_and_a_weight_inside_it_are_shared() -> None:
    model = Model()
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("block", (x,)), graph.get_attr("block.1.running_mean")))
    converted = featx.to_torch_fx(featx.GraphModule(model, graph))
    assert converted.block is model.block
    assert converted(X)[1] is model.block[1].running_mean
    assert list(model.block[1].state_dict()) == list(nn.BatchNorm1d(3).state_dict())


def test_graph_modules_inside_are_shared_as_they_are() -> None:
    inner = featx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    theirs = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.theirs = inner, theirs

    graph = featx.Graph()
    x = graph.call_module("inner", (graph.placeholder("x"),))
    graph.output(graph.call_module("theirs", (x,)))
    module = featx.GraphModule(Outer(), graph)
    converted = featx.to_torch_fx(module)
    back = featx.from_torch_fx(converted)
    for one in (converted, back):
        assert one.inner is inner
        assert one.theirs is theirs
        assert torch.equal(one(X), theirs(inner(X)))


def test_meta_of_the_module_is_copied() -> None:
    module = featx.trace(Model(), X)
    converted = featx.to_torch_fx(module)
    assert converted.meta == module.meta
    assert "free_dims" in converted.meta
    converted.meta["other"] = 1
    assert "other" not in module.meta
    assert featx.from_torch_fx(converted).meta == {**module.meta, "other": 1}


def test_graph_and_module_are_not_changed() -> None:
    module = featx.trace(Model(), X)
    text, edits, owner = str(module.graph), module.graph.edits, module.graph.owning_module
    metas = [dict(node.meta) for node in module.graph.nodes]
    converted = featx.to_torch_fx(module)
    assert (str(module.graph), module.graph.edits) == (text, edits)
    assert module.graph.owning_module is owner is module
    assert [node.meta for node in module.graph.nodes] == metas
    code, owner = converted.code, converted.graph.owning_module
    featx.from_torch_fx(converted)
    assert (converted.code, converted.graph.owning_module) == (code, owner)


def test_function_that_somebody_put_over_forward_stays() -> None:
    module = featx.symbolic_trace(Model())
    module.forward = lambda x: "mine"
    featx.to_torch_fx(module)
    assert module(X) == "mine"


def test_edits_of_a_module_of_torch_fx_count_without_recompiling() -> None:
    traced = torch.fx.symbolic_trace(lambda x: x.neg())
    traced.graph.find_nodes(op="call_method", target="neg")[0].target = "abs"
    assert torch.equal(featx.from_torch_fx(traced)(X), X.abs())


# -- meta of nodes -----------------------------------------------------------------------------------------------------


def test_meta_of_torch_fx_is_carried_over() -> None:
    converted = featx.to_torch_fx(featx.trace(Model(), X))
    ShapeProp(converted).propagate(X)
    for number, node in enumerate(converted.graph.nodes):
        node.meta["val"] = torch.empty(2, 3, device="meta")
        node.stack_trace = f"line {number}"
    back = featx.from_torch_fx(converted)
    for number, (node, twin) in enumerate(zip(converted.graph.nodes, back.graph.nodes, strict=True)):
        assert twin.meta["val"] is node.meta["val"]
        assert twin.meta.get("tensor_meta") is node.meta.get("tensor_meta")
        assert twin.stack_trace == f"line {number}"
        twin.meta["mine"] = 1
        assert "mine" not in node.meta


def test_nodes_in_meta_are_those_of_the_copy() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("neg", (x,))
    z = graph.call_method("abs", (y,))
    graph.output(z)
    foreign = featx.Graph().placeholder("x")
    shared = {"first": [x, (y,)], "later": slice(z), "plain": (1, {"a": 2})}
    for node in graph.nodes:
        node.meta.update(shared=shared, pair=(x, 1), one=y, other=foreign)
    theirs = featx.to_torch_fx(graph)
    for one in (theirs, featx.from_torch_fx(theirs)):
        nodes: dict[str, Any] = {node.name: node for node in one.nodes}
        for node in one.nodes:
            assert node.meta["shared"]["first"] == [nodes["x"], (nodes["neg"],)]
            assert node.meta["shared"]["later"].stop is nodes["abs_1"]
            assert node.meta["shared"]["plain"] is shared["plain"]
            assert node.meta["pair"] == (nodes["x"], 1)
            assert node.meta["one"] is nodes["neg"]
            assert node.meta["other"] is foreign
    assert shared["first"] == [x, (y,)]


# -- gradient mode and autocast ----------------------------------------------------------------------------------------


class Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = self.linear(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.linear(y)
        return y, z, self.linear(x)


def test_modes_that_forward_switches_are_switched() -> None:
    model = Switching()
    module = featx.trace(model, X)
    converted = featx.to_torch_fx(module)
    expected = model(X)
    for runs in (converted, torch.fx.Interpreter(converted).run, featx.from_torch_fx(converted)):
        found = runs(X)
        for value, other in zip(found, expected, strict=True):
            assert torch.equal(value, other)
            assert (value.requires_grad, value.dtype) == (other.requires_grad, other.dtype)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_modes_are_put_back_after_an_error() -> None:
    module = featx.trace(Switching(), X)
    fails = featx.to_torch_fx(module)
    second = fails.graph.find_nodes(op="call_module", target="linear")[1]
    second.args = ("not a tensor",)
    fails.recompile()
    for one in (fails, copy.deepcopy(fails)):
        with pytest.raises(TypeError):
            one(X)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_graph_that_was_cut_inside_a_region_leaves_no_mode_behind() -> None:
    converted = featx.to_torch_fx(featx.trace(Switching(), X))
    inside = converted.graph.find_nodes(op="call_module", target="linear")[1]
    for node in reversed(converted.graph.nodes):
        if node.op == "output":
            node.args = (inside,)
        elif node is inside:
            break
        else:
            converted.graph.erase_node(node)
    converted.recompile()
    assert converted(X).dtype is torch.bfloat16
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


# -- two graphs, guards ------------------------------------------------------------------------------------------------


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.auxiliary = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.main(x)
        return (y + self.auxiliary(x)).relu() if self.training else y.relu()


def test_present_graph_of_an_extractor_is_converted_or_the_one_that_is_given() -> None:
    model = TwoWays().eval()
    extractor = featx.create_feature_extractor(model, ["relu"], suppress_diff_warning=True)
    for training in (True, False, True):
        extractor.train(training)
        expected = model.train(training)(X)
        for graph in (None, extractor.train_graph if training else extractor.eval_graph):
            converted = featx.to_torch_fx(extractor, graph=graph)
            assert converted.training is training
            assert torch.equal(converted(X)["relu"], expected)
            assert hasattr(converted, "auxiliary") is training
    other = featx.to_torch_fx(extractor, graph=extractor.eval_graph)
    assert torch.equal(other(X)["relu"], model.main(X).relu())


def test_graph_of_a_module_of_torch_fx_may_be_given() -> None:
    model = TwoWays()
    traced = torch.fx.symbolic_trace(model)
    other = torch.fx.Tracer().trace(model.eval())
    assert torch.equal(featx.from_torch_fx(traced, graph=other)(X), model(X))


def test_literals_of_the_other_graph_come_with_it() -> None:
    class Shifting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (torch.tensor([1.0, 2.0, 3.0]) if self.training else torch.tensor([4.0, 5.0, 6.0])) + 0

    extractor = featx.create_feature_extractor(Shifting(), ["add_1"], suppress_diff_warning=True)
    converted = featx.to_torch_fx(extractor, graph=extractor.eval_graph)
    assert torch.equal(converted(X)["add_1"], X + torch.tensor([4.0, 5.0, 6.0]))


def test_guards_hold() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.neg() if x.shape[0] > 1 else x.abs()

    converted = featx.to_torch_fx(featx.trace(Deciding(), X))
    back = featx.from_torch_fx(converted)
    for runs in (converted, torch.fx.Interpreter(converted).run, back, copy.deepcopy(converted)):
        assert torch.equal(runs(X), -X)
        with pytest.raises(featx.SpecializationError, match="gt 1"):
            runs(X[:1])
    assert [node.meta.get("is_wrapped") for node in back.graph.nodes] == [None] * len(back.graph.nodes)


def test_pickled_module_keeps_its_guards() -> None:
    module = featx.GraphModule(nn.Module(), featx.trace(lambda x: x.neg() if x.shape[0] > 1 else x.abs(), X).graph)
    loaded = pickle.loads(pickle.dumps(featx.to_torch_fx(module)))
    assert torch.equal(loaded(X), -X)
    with pytest.raises(featx.SpecializationError, match="gt 1"):
        loaded(X[:1])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_other_objects_are_refused() -> None:
    anything: Any = nn.Linear(1, 1)
    with pytest.raises(featx.ArgumentTypeError, match=r"to_torch_fx takes .* got Linear; trace a model first"):
        featx.to_torch_fx(anything)
    with pytest.raises(featx.ArgumentTypeError, match=r"from_torch_fx takes .* got Linear"):
        featx.from_torch_fx(anything)
    ours: Any = featx.symbolic_trace(nn.Linear(1, 1))
    with pytest.raises(featx.ArgumentTypeError, match="got GraphModule"):
        featx.from_torch_fx(ours)
    theirs: Any = torch.fx.symbolic_trace(nn.Linear(1, 1))
    with pytest.raises(featx.ArgumentTypeError):
        featx.to_torch_fx(theirs)


def test_code_that_somebody_edits_is_refused_both_ways() -> None:
    module = featx.symbolic_trace(Model())
    converted = featx.to_torch_fx(module)
    with module.graph.on_generate_code(lambda _: lambda body: body):
        with pytest.raises(featx.GraphError, match="on_generate_code"):
            featx.to_torch_fx(module)
        with pytest.raises(featx.GraphError, match="on_generate_code"):
            featx.to_torch_fx(module.graph)
    with (
        converted.graph.on_generate_code(lambda _: lambda body: body),
        pytest.raises(featx.ArgumentTypeError, match="on_generate_code"),
    ):
        featx.from_torch_fx(converted)


def test_nested_inputs_of_torch_fx_are_refused() -> None:
    def add(pair: Any) -> Any:
        return pair[0] + pair[1]

    traced = torch.fx.symbolic_trace(add, concrete_args={"pair": (torch.fx.PH, torch.fx.PH)})
    with pytest.raises(featx.ArgumentTypeError, match=r"_PyTreeCodeGen.*set_codegen"):
        featx.from_torch_fx(traced)
    traced.graph.set_codegen(torch.fx.graph.CodeGen())
    assert torch.equal(featx.from_torch_fx(traced)(X, X)[0], X + X)  # flat now, as the nodes say


def test_malformed_graphs_are_refused() -> None:
    other = torch.fx.Graph().placeholder("x")
    graph = torch.fx.Graph()
    graph.output(other)
    with pytest.raises(featx.ForeignNodeError, match="'x' is read before"):
        featx.from_torch_fx(graph)
    ours = featx.Graph()
    ours.output(featx.Graph().placeholder("x"))
    with pytest.raises(featx.ForeignNodeError, match="belongs to another graph"):
        featx.to_torch_fx(ours)
    ours = featx.Graph()
    ours.output(ours.call_module("missing", (ours.placeholder("x"),)))
    with pytest.raises(featx.TargetError, match="'missing'"):
        featx.to_torch_fx(featx.symbolic_trace(Model()), graph=ours)
    theirs = torch.fx.symbolic_trace(Model())
    theirs.delete_submodule("block.0")
    with pytest.raises(featx.TargetError, match=r"'block\.0'"):
        featx.from_torch_fx(theirs)


@pytest.mark.parametrize("name", ["shape_env", "_tracer_cls"])
def test_attribute_whose_name_torch_fx_needs_is_refused(name: str) -> None:
    model = nn.Module()
    model.add_module(name, nn.Linear(3, 3))
    graph = featx.Graph()
    graph.output(graph.call_module(name, (graph.placeholder("x"),)))
    with pytest.raises(featx.TargetError, match=f"'{name}' of a torch.fx.GraphModule is something else"):
        featx.to_torch_fx(featx.GraphModule(model, graph))


@pytest.mark.parametrize("name", ["class", "0", "a b", "ünit"])
def test_odd_names_of_submodules_are_read_or_refused(name: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3)})
    graph = featx.Graph()
    graph.output(graph.call_module(name, (graph.placeholder("x"),)))
    module = featx.GraphModule(model, graph)
    if name == "class":  # which torch.fx writes as self.class
        with pytest.raises(featx.ArgumentTypeError, match=r"node '_?class_?\d*': its code cannot read .* 'class'"):
            featx.to_torch_fx(module)
        return
    assert torch.equal(featx.to_torch_fx(module)(X), model[name](X))


# -- graphs alone ------------------------------------------------------------------------------------------------------


def test_graph_alone_becomes_a_graph(assert_same: Any) -> None:
    module = featx.symbolic_trace(Model())
    theirs = featx.to_torch_fx(module.graph)
    assert type(theirs) is torch.fx.Graph
    assert_same(module.graph, theirs)
    theirs.lint()
    assert torch.equal(torch.fx.GraphModule(module, theirs)(X), module(X))
    ours = featx.from_torch_fx(theirs)
    assert type(ours) is featx.Graph
    assert_same(theirs, ours)


def test_unfinished_graphs_are_converted(assert_same: Any) -> None:
    for size in range(3):
        graph = featx.Graph()
        for number in range(size):
            graph.placeholder(f"x{number}")
        theirs = featx.to_torch_fx(graph)
        assert_same(graph, theirs)
        assert_same(theirs, featx.from_torch_fx(theirs))


def test_nodes_that_nobody_reads_stay(assert_same: Any) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.call_method("add_", (x, 1))
    graph.output(x)
    module = featx.GraphModule(nn.Module(), graph)
    converted = featx.to_torch_fx(module)
    assert_same(graph, converted.graph)
    assert torch.equal(converted(X.clone()), X + 1)


@pytest.mark.slow
def test_long_graphs_do_not_recurse(assert_same: Any) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    for number in range(3000):
        x = graph.call_function(operator.iadd, (x, 1)) if number % 2 else graph.call_method("neg", (x,))
    graph.output(x)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(_stack()) + 60)
    try:
        theirs = featx.to_torch_fx(graph)
        ours = featx.from_torch_fx(theirs)
    finally:
        sys.setrecursionlimit(limit)
    assert_same(graph, ours)


def _stack() -> list[Any]:
    frames: list[Any] = []
    frame = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_featx_does_not_load_the_conversion() -> None:
    code = """
import sys, torch
before = {name for name in sys.modules if name.startswith("torch.fx")}
import featx
assert not [name for name in sys.modules if name.startswith("featx.interop")]
assert {name for name in sys.modules if name.startswith("torch.fx")} == before
from featx import from_torch_fx
assert from_torch_fx is featx.from_torch_fx
assert "featx.interop.torch_fx" in sys.modules
assert set(featx.__all__) <= set(dir(featx))
try:
    featx.nothing
except AttributeError as error:
    assert "'featx' has no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
