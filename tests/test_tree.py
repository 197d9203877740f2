from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as torch_pytree

import featx
from featx.tree import clone_tensors, tree_leaves, tree_map


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Box:
    tensor: Any
    label: str


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict[str, Any]):
    """As transformers builds its outputs: a dict whose items are attributes, and which needs some of them."""

    logits: Any
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def double(leaf: Any) -> Any:
    return leaf * 2


NESTED = {"a": (1, [2, 3]), "b": Pair(4, {"c": 5}), "d": [], "e": (), "f": {}}


def test_structure_of_tuples_lists_and_dicts_is_kept() -> None:
    assert tree_map(double, NESTED) == {
        "a": (2, [4, 6]),
        "b": Pair(8, {"c": 10}),
        "d": [],
        "e": (),
        "f": {},
    }


def test_argument_is_not_changed() -> None:
    value = {"a": [1, (2,)]}
    tree_map(double, value)
    assert value == {"a": [1, (2,)]}


def test_leaves_are_those_of_torch_pytree_in_the_same_order() -> None:
    assert list(tree_leaves(NESTED)) == torch_pytree.tree_leaves(NESTED)


def test_leaves_come_in_the_order_in_which_map_visits_them() -> None:
    value = [NESTED, Box(7, "x"), ModelOutput(8, (9,)), collections.OrderedDict(z=10, a=11)]
    visited: list[Any] = []
    tree_map(visited.append, value)
    assert visited == list(tree_leaves(value)) == [1, 2, 3, 4, 5, 7, "x", 8, 9, 10, 11]


@pytest.mark.parametrize("value", [5, "text", None, frozenset({1}), range(3), Pair])
def test_anything_else_is_a_leaf(value: Any) -> None:
    assert list(tree_leaves(value)) == [value]
    assert tree_map(lambda leaf: [leaf], value) == [value]


def test_named_tuple_keeps_its_class() -> None:
    assert type(tree_map(double, Pair(1, 2))) is Pair


def test_torch_size_keeps_its_class() -> None:
    doubled = tree_map(double, torch.Size([1, 2]))
    assert type(doubled) is torch.Size
    assert doubled == torch.Size([2, 4])


def test_result_of_max_keeps_its_class_and_fields() -> None:
    result = torch.tensor([[1, 5], [7, 2]]).max(dim=1)
    doubled = tree_map(double, result)
    assert type(doubled) is type(result)
    assert doubled.values.tolist() == [10, 14]


def test_packed_sequence_keeps_its_class() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    cloned = clone_tensors(packed)
    assert type(cloned) is PackedSequence
    assert cloned.data is not packed.data
    assert torch.equal(cloned.data, packed.data)


def test_frozen_dataclass_is_rebuilt() -> None:
    assert tree_map(double, Box(2, "x")) == Box(4, "xx")


def test_dataclass_class_itself_is_a_leaf() -> None:
    assert list(tree_leaves(Box)) == [Box]


def test_model_output_keeps_its_class_items_and_attributes() -> None:
    doubled = tree_map(double, ModelOutput(logits=1, hidden=(2, 3)))
    assert type(doubled) is ModelOutput
    assert dict(doubled) == {"logits": 2, "hidden": (4, 6)}
    assert (doubled.logits, doubled.hidden) == (2, (4, 6))


def test_default_dict_keeps_its_factory() -> None:
    doubled = tree_map(double, collections.defaultdict(list, a=1))
    assert doubled == {"a": 2}
    assert doubled["new"] == []


class ReadOnly(Mapping[str, Any]):
    def __init__(self, items: dict[str, Any]) -> None:
        self.items_by_name = items

    def __getitem__(self, key: str) -> Any:
        return self.items_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


@pytest.mark.parametrize("kind", [ReadOnly, types.MappingProxyType])
def test_mapping_that_cannot_be_written_is_built_anew(kind: Any) -> None:
    mapped = tree_map(lambda number: number + 1, kind({"a": 1}))
    assert type(mapped) is kind
    assert dict(mapped) == {"a": 2}


def test_ordered_dict_keeps_its_class_and_order() -> None:
    doubled = tree_map(double, collections.OrderedDict(z=1, a=2))
    assert type(doubled) is collections.OrderedDict
    assert list(doubled.items()) == [("z", 2), ("a", 4)]


def test_clones_share_no_memory_and_keep_the_memory_format() -> None:
    tensor = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    [cloned] = clone_tensors([tensor])
    assert torch.equal(cloned, tensor)
    assert cloned.data_ptr() != tensor.data_ptr()
    assert cloned.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x[:, 1:3, ::2],
        lambda x: x[:, :1].expand(6, 5, 4),
        lambda x: x.unfold(1, 3, 1),
        lambda x: x.transpose(0, 2),
        lambda x: x[:0].expand(0, 5, 4),
    ],
)
def test_clones_have_the_strides_of_what_they_are_clones_of(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    base = torch.rand(6, 5, 4, requires_grad=True)
    tensor = view(base)
    cloned = clone_tensors(tensor)
    assert torch.equal(cloned, tensor)
    assert cloned.stride() == tensor.stride()
    assert cloned.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    weight = torch.rand(tensor.shape)
    expected, got = (torch.autograd.grad((each * weight).sum(), base)[0] for each in (tensor, cloned))
    torch.testing.assert_close(got, expected)


def test_object_that_holds_tensors_and_is_no_structure_is_refused() -> None:
    with pytest.raises(featx.RequestError, match="a SimpleNamespace, and a tensor in it"):
        clone_tensors([types.SimpleNamespace(x=torch.ones(2))])


def test_gradients_flow_through_clones() -> None:
    tensor = torch.ones(2, requires_grad=True)
    clone_tensors({"x": tensor})["x"].sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [1.0, 1.0]


def test_values_that_are_not_tensors_are_not_cloned() -> None:
    marker = object()
    assert clone_tensors((marker,))[0] is marker


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.quantize_per_tensor is deprecated
def test_a_quantized_tensor_is_cloned() -> None:
    tensor = torch.quantize_per_tensor(torch.rand(2, 3, 4, 4), 0.1, 0, torch.quint8).permute(0, 2, 3, 1)
    clone = clone_tensors(tensor)
    assert clone.is_quantized
    assert torch.equal(clone.int_repr(), tensor.int_repr())
    assert clone.data_ptr() != tensor.data_ptr()
