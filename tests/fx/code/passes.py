"""torch.fx's passes and their parts, as code bases call them."""

import operator

import torch
import torch.fx
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.optimization import (
    extract_subgraph,
    fuse,
    matches_module_pattern,
    remove_dropout,
    replace_node_module,
)
from torch.fx.operator_schemas import ArgsKwargsPair, get_signature_for_torch_op, normalize_function, normalize_module
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.fx.passes.graph_manipulation import replace_target_nodes_with
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.fx.passes.infra.pass_manager import PassManager, pass_result_wrapper, this_before_that_pass_constraint
from torch.fx.passes.operator_support import (
    OperatorSupport,
    OperatorSupportBase,
    OpSupports,
    any_chain,
    chain,
    create_op_support,
)
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata
from torch.fx.passes.split_module import split_module
from torch.fx.passes.split_utils import getattr_recursive, setattr_recursive, split_by_tags
from torch.fx.passes.tools_common import get_node_target, legalize_graph, stable_topological_sort


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        for norm in (self.stem[1], self.norm):
            norm.running_mean.uniform_()
            norm.running_var.uniform_(1, 2)

    def forward(self, x):
        x = self.stem(x)
        y = self.drop(self.norm(self.conv(x)))
        x = torch.relu(x + y)
        return self.head(torch.flatten(x, 2).mean(dim=-1))


def traced():
    return symbolic_trace(Model().eval())


def image():
    torch.manual_seed(1)
    return torch.rand(2, 3, 6, 6)


def structure(module):
    return [(name, type(child).__name__) for name, child in module.named_children()]


# -- splitting ---------------------------------------------------------------------------------------------------------


def case_split_module():
    module, model = traced(), Model()
    stage = 0
    stages = {}
    for node in module.graph.nodes:
        stages[node] = stage
        stage += node.name in ("stem_2", "relu")
    split = split_module(module, model, lambda node: stages[node])
    children = [(name, [(n.op, n.name) for n in child.graph.nodes]) for name, child in split.named_children()]
    calls = [(n.op, n.name, n.target) for n in split.graph.nodes]
    return torch.allclose(split(image()), module(image())), children, calls


def case_split_module_names_of_modules():
    module, names = traced(), {}
    split = split_module(
        module, module, lambda node: int(node.name != "stem_0"), qualname_map=names, partition_affix="pp"
    )
    # torch.fx writes the paths inside the children with underscores.
    return sorted(names.values()), sorted(new.replace(".", "_") for new in names), structure(split)


def case_split_by_tags():
    module = traced()
    tag = "front"
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.tag = tag
        if node.name == "relu":
            tag = "back"
    split, names = split_by_tags(module, ["front", "back"], return_fqn_mapping=True)
    return split(image()), structure(split), sorted(names.items())


class OnlyConvolutions(OperatorSupportBase):
    def is_node_supported(self, submodules, node):
        return node.op == "call_module" and isinstance(submodules[node.target], (nn.Conv2d, nn.BatchNorm2d, nn.ReLU))


def case_partitioner():
    module = traced()
    partitioner = CapabilityBasedPartitioner(module, OnlyConvolutions(), allows_single_node_partition=True)
    partitions = partitioner.propose_partitions()
    sizes = sorted(partition.size() for partition in partitions)
    fused = partitioner.fuse_partitions(partitions)
    return sizes, sum(sizes), fused(image()), len([n for n in fused.graph.nodes if "fused" in str(n.target)])


def case_partition_and_fuse():
    def function(x):
        y = torch.cos(torch.sin(x + 1))
        return torch.tanh(y).relu() * torch.exp(x)

    def is_supported(submodules, node):
        return node.op == "call_function" and node.target not in (torch.tanh, operator.mul)

    found = []
    for kwargs in ({}, {"allows_single_node_partition": True}, {"non_compute_ops": ["torch.cos", "torch.exp"]}):
        module = symbolic_trace(function)
        fused = CapabilityBasedPartitioner(module, create_op_support(is_supported), **kwargs).partition_and_fuse()
        inner = [child for name, child in fused.named_children() if name.startswith("fused_")]
        found.append((fused(torch.ones(2)), [len(child.graph.nodes) for child in inner], len(fused.graph.nodes)))
    return found, isinstance(inner[0], GraphModule)


def case_partition():
    nodes = list(traced().graph.nodes)
    part = Partition(3, nodes[1:3])
    part.add_node(nodes[3])
    part.remove_node(nodes[1])
    return part.id, part.size(), list(part.nodes)


def case_operator_support():
    module = traced()
    modules = dict(module.named_modules())
    support = OperatorSupport(
        {"torch.nn.modules.conv.Conv2d": None, "_operator.add": None, "torch.relu": None, "mean": None}
    )
    not_first = OpSupports.decline_if_node_in_names({"stem_0"})
    own = create_op_support(lambda submodules, node: node.op == "call_method")
    rules = [support, not_first, own, chain(support, not_first), any_chain(own, chain(support, not_first))]
    return [[rule.is_node_supported(modules, node) for node in module.graph.nodes] for rule in rules]


def case_node_targets():
    module = traced()
    modules = dict(module.named_modules())
    return [get_node_target(modules, node) for node in module.graph.nodes if node.op.startswith("call_")]


# -- shapes -----------------------------------------------------------------------------------------------------------


def case_shape_prop():
    module = traced()
    result = ShapeProp(module).propagate(image())
    metas = [(n.name, n.meta["type"].__name__, n.meta.get("tensor_meta")) for n in module.graph.nodes]
    return result, [(name, kind, tuple(meta)) for name, kind, meta in metas], isinstance(metas[0][2], TensorMetadata)


def case_shape_prop_of_nested_values():
    module = symbolic_trace(lambda x: ({"a": x, "b": [x.split(1), x.shape[0]]}, 2))
    ShapeProp(module).propagate(torch.ones(2, 3))
    found = {n.name: n.meta.get("tensor_meta") for n in module.graph.nodes}
    return [piece.shape for piece in found["split"]], found["output"][0]["a"].stride, found["getitem"]


def case_own_shape_prop():
    class Noting(ShapeProp):
        def run_node(self, n):
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                n.meta["note"] = tuple(result.shape)
            return result

    module = traced()
    Noting(module).propagate(image())
    return [n.meta.get("note") for n in module.graph.nodes]


def case_dtypes_decide_what_is_supported():
    module = traced()
    ShapeProp(module).propagate(image())
    modules = dict(module.named_modules())
    support = OperatorSupport({"torch.relu": (([torch.float32],), {}), "mean": (([torch.int8],), {})})
    no_floats = OpSupports.decline_if_input_dtype(torch.float32)
    calls = [n for n in module.graph.nodes if n.op.startswith("call_")]
    return [(support.is_node_supported(modules, n), no_floats.is_node_supported(modules, n)) for n in calls]


# -- passes ------------------------------------------------------------------------------------------------------------


class ReluToGelu(PassBase):
    def requires(self, graph_module):
        assert isinstance(graph_module, GraphModule)

    def call(self, graph_module):
        modified = False
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target is torch.relu:
                node.target = nn.functional.gelu
                modified = True
        return PassResult(graph_module, modified)

    def ensures(self, graph_module):
        graph_module.graph.lint()


def double_output(graph_module):
    output = graph_module.graph.output_node()
    with graph_module.graph.inserting_before(output):
        output.args = (graph_module.graph.call_function(operator.mul, (output.args[0], 2)),)
    return graph_module


def case_pass():
    module = traced()
    result = ReluToGelu()(module)
    again = ReluToGelu()(result.graph_module)
    graph_module, modified = result
    module.recompile()
    return modified, again.modified, graph_module is module, module(image())


def case_pass_manager():
    module, order = traced(), []

    def first(graph_module):
        order.append("first")
        return PassResult(graph_module, False)

    def second(graph_module):
        order.append("second")
        return PassResult(graph_module, False)

    manager = PassManager([second, ReluToGelu(), first], [this_before_that_pass_constraint(first, second)], steps=3)
    manager.add_pass(pass_result_wrapper(double_output))
    manager.add_checks(lambda graph_module: order.append("check"))
    manager.steps = 1
    result = manager(module)
    return order.index("first") < order.index("second"), order[0], result.modified, result.graph_module(image())


def case_pass_manager_stops_when_nothing_changes():
    runs = []

    def nothing(graph_module):
        runs.append(1)
        return PassResult(graph_module, len(runs) < 3)

    return PassManager([nothing], steps=10)(traced()).modified, len(runs)


def case_constraints():
    def one(graph_module): ...

    def two(graph_module): ...

    bad = PassManager([two, one], [this_before_that_pass_constraint(one, two)])
    refused = []
    for function in (
        bad.validate_constraints,
        PassManager(
            [one, two], [this_before_that_pass_constraint(one, two), this_before_that_pass_constraint(two, one)]
        ).solve_constraints,
    ):
        try:
            function()
        except RuntimeError:
            refused.append("refused")
    bad.solve_constraints()
    bad.validate_constraints()
    return refused, [function.__name__ for function in bad.passes]


def case_failing_pass_is_named():
    def broken(graph_module):
        raise KeyError("no such thing")

    try:
        PassManager([broken])(traced())
    except Exception as error:
        return "broken" in str(error), type(error.__cause__).__name__
    return None


def case_cse():
    def function(x):
        return torch.cos(x + 1) + torch.cos(x + 1) * torch.sin(x + 2)

    module = symbolic_trace(function)
    result = CSEPass()(module)
    graph_module = result.graph_module
    return result.modified, len(graph_module.graph.nodes), graph_module(torch.ones(2)), CSEPass()(graph_module).modified


def case_topological_sorts():
    found = []
    for sort in (legalize_graph, stable_topological_sort):
        module = traced()
        nodes = {node.name: node for node in module.graph.nodes}
        nodes["output"].append(nodes["add"])
        nodes["conv"].append(nodes["stem_0"])
        result = sort(module)
        result.graph.lint()
        result.recompile()
        found.append(([node.name for node in result.graph.nodes], result(image()), result is module))
    return found


def case_replaced_targets():
    module = traced()
    replace_target_nodes_with(module, "call_function", torch.relu, "call_function", torch.sigmoid)
    module.recompile()
    return str(module.graph), module(image())


def case_attributes_by_path():
    module = traced()
    setattr_recursive(module, "stem.1.note", 3)
    setattr_recursive(module, "other", 4)
    return getattr_recursive(module, "stem.1.note"), module.other, getattr_recursive(module, "stem.7.note")


# -- experimental.optimization -----------------------------------------------------------------------------------------


def case_fuse():
    model = Model().eval()
    fused = fuse(model)
    kinds = [type(fused.get_submodule(n.target)).__name__ for n in fused.graph.nodes if n.op == "call_module"]
    same = torch.allclose(fused(image()), model(image()), atol=1e-6)
    return sorted(kinds), same, type(model.stem[1]).__name__, model.norm.running_mean


def case_remove_dropout():
    module = remove_dropout(Model().train())
    return [(n.op, n.target) for n in module.graph.nodes], module.eval()(image())


def case_extract_subgraph():
    module = traced()
    nodes = {node.name: node for node in module.graph.nodes}
    part = extract_subgraph(module, [nodes["conv"], nodes["norm"]], [nodes["stem_2"]], [nodes["norm"], nodes["conv"]])
    return str(part.graph), part(torch.ones(1, 4, 2, 2))


def case_replaced_modules():
    module = traced()
    modules = dict(module.named_modules())
    found = [n.name for n in module.graph.nodes if matches_module_pattern((nn.Conv2d, nn.BatchNorm2d), n, modules)]
    node = next(node for node in module.graph.nodes if node.target == "stem.2")
    replace_node_module(node, modules, nn.Hardtanh(0.0, 0.5))
    return found, module(image()), type(modules["stem.2"]).__name__


# -- schemas -----------------------------------------------------------------------------------------------------------


def case_normalize_function():
    x = torch.ones(2)
    calls = [
        (torch.nn.functional.relu, (x,), {}, None),
        (torch.nn.functional.dropout, (x,), {"p": 0.3}, None),
        (torch.nn.functional.max_pool2d, (x, 2), {}, None),
        (torch.cat, ([x, x],), {}, (list[torch.Tensor], int)),
        (torch.flatten, (x, 1), {}, (torch.Tensor, int)),
        (torch.ops.aten.add.Tensor, (x, x), {}, None),
        (torch.ops.aten.softmax.int, (x,), {"dim": 1}, None),
    ]
    return [
        normalize_function(target, args, kwargs, arg_types=types, normalize_to_only_use_kwargs=only)
        for target, args, kwargs, types in calls
        for only in (False, True)
    ]


def case_normalize_module():
    model, x = Model(), torch.ones(1)
    pair = normalize_module(model, "conv", (x,), normalize_to_only_use_kwargs=True)
    return pair, isinstance(pair, ArgsKwargsPair), normalize_module(nn.Sequential(Model()), "0", (x,))


def case_normalized_arguments():
    module = traced()
    nodes = {node.name: node for node in module.graph.nodes}
    found = []
    for name, types in (
        ("stem_0", None),
        ("flatten", (torch.Tensor, int)),
        ("mean", None),
        ("x", None),
        ("relu", None),
    ):
        found.append(nodes[name].normalized_arguments(module, types, normalize_to_only_use_kwargs=True))
    return found


def case_signatures():
    names = [
        sorted(get_signature_for_torch_op(torch.relu)[0].parameters),
        get_signature_for_torch_op(nn.functional.relu),
    ]
    return names, len(get_signature_for_torch_op(torch.ops.aten.relu.default))
