from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from featx import Graph
from featx.errors import ArgumentTypeError
from featx.ir.immutable import ImmutableDict, ImmutableList


@pytest.mark.parametrize(
    "edit",
    [
        lambda items: items.append(1), lambda items: items.extend([1]), lambda items: items.insert(0, 1),
        lambda items: items.remove(1), lambda items: items.clear(), lambda items: items.sort(),
        lambda items: items.pop(), lambda items: items.reverse(), lambda items: items.__setitem__(0, 2),
        lambda items: items.__delitem__(0), lambda items: items.__iadd__([1]), lambda items: items.__imul__(2),
    ],
)  # fmt: skip
def test_list_in_arguments_refuses_every_edit(edit: Any) -> None:
    node = Graph().call_function(torch.cat, ([1, 2],))
    with pytest.raises(ArgumentTypeError, match=r"assign a new tuple to node\.args"):
        edit(node.args[0])
    assert node.args == ([1, 2],)


@pytest.mark.parametrize(
    "edit",
    [
        lambda items: items.__setitem__("k", 2), lambda items: items.__delitem__("k"), lambda items: items.clear(),
        lambda items: items.pop("k"), lambda items: items.popitem(), lambda items: items.setdefault("j", 1),
        lambda items: items.update(k=2), lambda items: items.__ior__({"k": 2}),
    ],
)  # fmt: skip
def test_dict_in_arguments_refuses_every_edit(edit: Any) -> None:
    node = Graph().call_function(dict, (), {"k": 1})
    with pytest.raises(ArgumentTypeError, match=r"assign a new dict to node\.kwargs"):
        edit(node.kwargs)
    assert node.kwargs == {"k": 1}


def test_caller_keeps_a_list_that_can_be_edited() -> None:
    shape = [1, 2]
    node = Graph().call_function(torch.zeros, (shape,))
    shape.append(3)
    assert node.args == ([1, 2],)


def test_lists_and_dicts_in_arguments_are_hashable_by_value() -> None:
    assert hash(ImmutableList([1, 2])) == hash(ImmutableList([1, 2]))
    assert hash(ImmutableDict(a=1, b=2)) == hash(ImmutableDict(b=2, a=1))


def test_lists_and_dicts_in_arguments_are_equal_to_plain_ones_also_after_a_copy() -> None:
    for value, plain in ((ImmutableList([1, [2]]), [1, [2]]), (ImmutableDict(a=[1]), {"a": [1]})):
        for same in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert same == plain
            assert type(same) is type(value)


def test_trees_of_torch_see_what_is_inside() -> None:
    value = (ImmutableList([1, ImmutableDict({"a": 2})]), ImmutableDict({"b": ImmutableList([3])}))
    leaves, spec = pytree.tree_flatten(value)
    assert leaves == [1, 2, 3]
    rebuilt = pytree.tree_unflatten([10, 20, 30], spec)
    assert rebuilt == ([10, {"a": 20}], {"b": [30]})
    assert type(rebuilt[0]) is ImmutableList
    assert type(rebuilt[1]["b"]) is ImmutableList
    assert type(rebuilt[0][1]) is ImmutableDict
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    assert paths == ["[0][0]", "[0][1]['a']", "[1]['b'][0]"]
