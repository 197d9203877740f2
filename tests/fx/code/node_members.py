"""Every documented member of torch.fx.Node, and map_arg and map_aggregate."""

import operator

import torch
from torch.fx import Graph, Node, map_arg
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import Argument, Target, base_types, map_aggregate
from torch.utils import _pytree as pytree


def build():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(operator.add, (x, y))
    cat = graph.call_function(torch.cat, ([total, x, (y, 1)],), {"dim": 0})
    graph.output({"cat": cat, "slice": slice(total, None, 2)})
    return graph


def by_name(graph):
    return {node.name: node for node in graph.nodes}


def case_attributes():
    graph = build()
    return [
        (n.op, n.name, n.target, n.args, n.kwargs, n.type, n.all_input_nodes, list(n.users), n.meta, n.graph is graph)
        for n in graph.nodes
    ]


def case_input_nodes():
    return [list(node._input_nodes) for node in build().nodes]


def case_order():
    nodes = list(build().nodes)
    return (
        nodes[0] < nodes[1], nodes[2] > nodes[3], nodes[1] <= nodes[1], sorted(set(nodes)), max(nodes),
        nodes[1].next, nodes[1].prev,
    )  # fmt: skip


def case_append_and_prepend():
    nodes = by_name(build())
    nodes["x"].prepend(nodes["y"])
    nodes["output"].prepend(nodes["add"])
    nodes["x"].append(nodes["add"])
    return str(nodes["x"].graph)


def case_args():
    nodes = by_name(build())
    nodes["add"].args = (nodes["x"], 3)
    nodes["cat"].kwargs = {"dim": 1}
    nodes["cat"].update_kwarg("dim", 2)
    nodes["cat"].update_arg(0, [nodes["add"]])
    nodes["add"].insert_arg(1, nodes["x"])
    return str(nodes["x"].graph), [(name, sorted(node.users)) for name, node in nodes.items()]


def case_args_assigned_as_a_list():
    nodes = by_name(build())
    nodes["add"].args = [nodes["y"], 2]
    return list(nodes["add"].args), list(nodes["x"].users), sorted(nodes["y"].users)


def case_arguments_are_immutable():
    node = by_name(build())["cat"]
    refused = 0
    for edit in (lambda: node.args[0].append(1), lambda: node.kwargs.update(a=1), lambda: node.kwargs.pop("dim")):
        try:
            edit()
        except (TypeError, NotImplementedError):
            refused += 1
    return (
        refused,
        isinstance(node.args[0], immutable_list),
        isinstance(node.kwargs, immutable_dict),
        node.args[0] == [*node.args[0]],
    )


def case_trees_of_torch_see_nodes_in_lists():
    node = by_name(build())["cat"]
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    args, kwargs = pytree.tree_unflatten([str(leaf) for leaf in leaves], spec)
    mapped = pytree.tree_map_only(Node, lambda n: n.name, node.args)
    paths = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(node.args)[0]]
    return [str(leaf) for leaf in leaves], args, kwargs, mapped, type(args[0]) is immutable_list, paths


def case_replace_all_uses_with():
    nodes = by_name(build())
    with nodes["x"].graph.inserting_after(nodes["add"]):
        relu = nodes["x"].graph.call_function(torch.relu, (nodes["x"],))
    changed = nodes["add"].replace_all_uses_with(relu)
    return changed, str(nodes["x"].graph), nodes["add"].users


def case_replace_some_uses():
    nodes = by_name(build())
    changed = nodes["x"].replace_all_uses_with(nodes["y"], delete_user_cb=lambda user: user.name == "cat")
    return changed, str(nodes["x"].graph)


def case_replace_with_meta():
    nodes = by_name(build())
    nodes["x"].meta["note"] = 1
    nodes["x"].replace_all_uses_with(nodes["y"], propagate_meta=True)
    return nodes["y"].meta


def case_replace_input_with():
    nodes = by_name(build())
    nodes["cat"].replace_input_with(nodes["y"], nodes["x"])
    return nodes["cat"].args, list(nodes["y"].users)


def case_wrapped_in_its_replacement():
    nodes = by_name(build())
    graph = nodes["x"].graph
    with graph.inserting_after(nodes["add"]):
        neg = graph.call_function(torch.neg, (nodes["add"],))
    nodes["add"].replace_all_uses_with(neg, delete_user_cb=lambda user: user is not neg)
    graph.lint()
    return str(graph)


def case_is_impure():
    return [node.is_impure() for node in build().nodes]


def case_format_node():
    return [node.format_node() for node in build().nodes], [repr(node) for node in build().nodes]


def case_stack_trace():
    node = next(iter(build().nodes))
    before = node.stack_trace
    node.stack_trace = "there"
    return before, node.stack_trace, node.meta


def case_own_attributes():
    node = next(iter(build().nodes))
    node.tag = "left"
    return node.tag, getattr(node, "other", None)


def case_map_arg():
    nodes = by_name(build())
    seen = []
    mapped = map_arg(
        (nodes["x"], [1, nodes["y"]], {"k": slice(nodes["add"], None)}), lambda n: seen.append(n) or n.name
    )
    return seen, mapped, map_aggregate([1, (2, {"a": 3})], lambda v: v * 10)


def case_types():
    def first(argument: Argument, target: Target):
        return isinstance(argument, base_types), callable(target)

    return first(1.0, torch.relu), first([], "relu"), int in base_types, torch.Tensor in base_types
