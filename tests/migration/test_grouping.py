from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.errors import GraphError, PassError
from featx.migration.grouping import getattr_recursive, split_by_tags
from featx.migration.operator_support import OperatorSupport, OpSupports, create_op_support, get_node_target
from featx.migration.optimization import fuse, remove_dropout
from featx.migration.partitioner import CapabilityBasedPartitioner
from featx.migration.topology import stable_topological_sort


def chain(x: Any) -> Any:
    return torch.tanh(torch.cos(torch.sin(x)))


def test_partitions_are_as_few_as_the_order_of_effects_allows() -> None:
    def function(x: Any) -> Any:
        first = torch.sin(x)
        x.add_(1)  # which is not supported, and must run between the two
        return torch.sin(first) + torch.sin(x)

    module = featx.symbolic_trace(function)
    support = create_op_support(lambda _, node: node.op == "call_function")
    fused = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True).partition_and_fuse()
    assert torch.equal(fused(torch.ones(2)), function(torch.ones(2)))
    assert len([name for name, _ in fused.named_children()]) == 2
    assert [name for name, _ in module.named_children()] == []


def test_single_call_may_be_a_partition_if_its_target_is_named() -> None:
    module = featx.symbolic_trace(chain)
    support = create_op_support(lambda _, node: node.target in (torch.sin, torch.tanh))
    for allowed, sizes in ((None, []), (["torch.sin"], [1])):
        found = CapabilityBasedPartitioner(module, support, allowed_single_node_partition_ops=allowed)
        assert [part.size() for part in found.propose_partitions()] == sizes


def test_calls_that_compute_nothing_do_not_make_a_partition() -> None:
    module = featx.symbolic_trace(chain)
    support = create_op_support(lambda _, node: node.op == "call_function")
    for non_compute, sizes in (([], [3]), (["torch.cos"], [3]), (["torch.cos", "torch.sin"], [])):
        found = CapabilityBasedPartitioner(module, support, non_compute_ops=non_compute).propose_partitions()
        assert [part.size() for part in found] == sizes


def test_call_without_a_tag_is_named() -> None:
    module = featx.symbolic_trace(chain)
    for node in module.graph.nodes:
        node.tag = "only"
    del module.graph.find_nodes(op="call_function", target=torch.cos)[0].tag
    with pytest.raises(PassError, match=r"node 'cos' has the tag None; expected one of only"):
        split_by_tags(module, ["only"])


def test_tagged_parts_that_need_each_other_are_refused() -> None:
    module = featx.symbolic_trace(chain)
    for node, tag in zip(module.graph.nodes, ("", "a", "b", "a", ""), strict=True):
        node.tag = tag
    with pytest.raises(PassError, match="cannot run one after the other"):
        split_by_tags(module, ["a", "b"])


def test_children_return_tuples_where_that_is_asked_for() -> None:
    module = featx.symbolic_trace(chain)
    for node, tag in zip(module.graph.nodes, ("", "a", "a", "b", ""), strict=True):
        node.tag = tag
    for returns_tuple in (False, True):
        split = split_by_tags(module, ["a", "b"], return_tuple=returns_tuple)
        assert isinstance(split.a(torch.ones(2)), tuple) is returns_tuple
        assert torch.equal(split(torch.ones(2)), chain(torch.ones(2)))


def test_attribute_that_is_not_there_is_none() -> None:
    assert getattr_recursive(nn.Sequential(nn.ReLU()), "0.no.such") is None


def test_dtypes_of_inputs_decide_what_is_supported() -> None:
    graph = featx.trace(lambda x, i: torch.index_select(x, 0, i).add(x), torch.rand(2), torch.tensor([0, 1])).graph
    select = next(node for node in graph.nodes if node.name == "index_select")
    wanted = {"torch.index_select": ((None, None, [torch.int64]), {})}
    assert OperatorSupport(wanted).is_node_supported({}, select)
    wanted = {"torch.index_select": (([torch.float64],), {})}
    assert not OperatorSupport(wanted).is_node_supported({}, select)
    assert not OpSupports.decline_if_input_dtype(torch.int64).is_node_supported({}, select)
    assert OpSupports.decline_if_input_dtype(torch.int32).is_node_supported({}, select)


def test_dtype_by_name_is_asked_for_too() -> None:
    graph = featx.trace(lambda x: torch.sum(input=x), torch.rand(2)).graph
    node = next(node for node in graph.nodes if node.target is torch.sum)
    for dtype, expected in ((torch.float32, True), (torch.int8, False)):
        assert OperatorSupport({"torch.sum": ((), {"input": [dtype]})}).is_node_supported({}, node) is expected


def test_unknown_dtype_is_said_to_be_unknown() -> None:
    graph = featx.symbolic_trace(chain).graph
    with pytest.raises(GraphError, match="dtype of node 'x' is not known; run ShapeProp"):
        OpSupports.decline_if_input_dtype(torch.int64).is_node_supported({}, graph.find_nodes(op="placeholder")[0].next)


def test_what_calls_nothing_has_no_target() -> None:
    with pytest.raises(GraphError, match="node 'x' is a placeholder and calls nothing"):
        get_node_target({}, featx.symbolic_trace(chain).graph.find_nodes(op="placeholder")[0])


def test_circle_is_refused_and_nothing_moves() -> None:
    module = featx.symbolic_trace(chain)
    sin, cos, tanh = module.graph.find_nodes(op="call_function", target=torch.sin)[0], None, None
    cos, tanh = sin.next, sin.next.next
    sin.args = (tanh,)
    with pytest.raises(GraphError, match=r"in a circle.*'sin', 'cos', 'tanh', 'output'"):
        stable_topological_sort(module)
    assert [node.name for node in module.graph.nodes] == ["x", "sin", "cos", "tanh", "output"]
    assert cos.args == (sin,)


def test_order_that_is_right_stays_and_nodes_stay_themselves() -> None:
    module = featx.symbolic_trace(chain)
    nodes = list(module.graph.nodes)
    assert list(stable_topological_sort(module).graph.nodes) == nodes
    nodes[-1].append(nodes[0])  # the input goes last
    assert list(stable_topological_sort(module).graph.nodes) == nodes
    assert torch.equal(module(torch.ones(2)), chain(torch.ones(2)))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Dropout(0.9))


def test_fusing_in_train_mode_is_refused() -> None:
    with pytest.raises(PassError, match="train mode"):
        fuse(layers().train())


def test_graph_module_is_fused_itself_only_where_that_is_asked_for() -> None:
    module = featx.symbolic_trace(layers().eval())
    assert fuse(module, no_trace=True) is not module
    assert isinstance(module.get_submodule("1"), nn.BatchNorm1d)
    assert fuse(module, inplace=True, no_trace=True) is module
    assert len(module.graph.find_nodes(op="call_module")) == 2


def test_dropout_is_removed_in_train_mode_too() -> None:
    model = layers().train()
    x = torch.rand(3, 2, 4)
    expected = nn.Sequential(*model[:2])(x)
    assert torch.equal(remove_dropout(model)(x), expected)
    assert len(model) == 3
