from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.node import _get_qualified_name as name_in_torch_fx
from torch.nn import functional

import featx
from featx.ir.names import Namespace, identifier_of, name_of_target, qualified_name, resolve

WISHES = [
    "relu", "relu_1", "relu_2", "x", "x_1", "x_01", "x_1_1", "x__1", "x_10", "x_0", "_1", "", "1", "0_0", "a.b",
    "a..b", "layer1.0", "a-1", "a b", "if", "None_1", "True", "print", "len", "len_1", "class_2", "inf", "nan",
    "torch", "device", "NoneType", "pytree", "fx_pytree", "self", "_", "__", "__add__", "add_", "_unnamed", "A_3",
    "ünï", "%%", "input",
]  # fmt: skip
FUNCTIONS = [
    torch.relu, functional.relu, functional.gelu, functional.max_pool2d, functional.threshold, functional.interpolate,
    functional.scaled_dot_product_attention, functional.one_hot, torch.Tensor.add, torch.Tensor.relu_,
    torch.Tensor.__add__, torch.Tensor.size, torch.Size, torch.conv2d, torch.max, torch.fft.fft, torch.linalg.norm,
    torch.special.expit, torch.nn.init.zeros_, torch._assert, torch.einsum, torch.stft, torch.ops.aten.add.Tensor,
    torch.ops.aten.add, operator.add, operator.getitem, operator.iadd, operator.and_, math.sqrt, getattr, len, dict,
    nn.ReLU, torch.broadcast_tensors, nn.utils.rnn.pack_padded_sequence, torch.sym_not,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_names_that_were_taken_back_leave_the_namespace_as_it_was(seed: int) -> None:
    choose = random.Random(seed)
    wishes = [choose.choice(WISHES) for _ in range(300)]
    taken_back, other = Namespace(), Namespace()
    for wish in wishes[:100]:
        assert taken_back.create_name(wish) == other.create_name(wish)
    mark = taken_back.mark()
    for wish in wishes[100:200]:
        taken_back.create_name(wish)
    taken_back.forget(mark)
    for wish in wishes[200:]:
        assert taken_back.create_name(wish) == other.create_name(wish)


@pytest.mark.parametrize("seed", range(5))
def test_random_wishes_get_the_names_that_torch_fx_gives(seed: int) -> None:
    choose = random.Random(seed)
    theirs, ours = torch.fx.Graph(), featx.Graph()
    wishes = [choose.choice(WISHES) for _ in range(400)]
    wishes += ["".join(choose.choice("ab_01.") for _ in range(choose.randint(0, 5))) for _ in range(200)]
    choose.shuffle(wishes)
    assert [ours.create_node("placeholder", "t", name=wish).name for wish in wishes] == [
        theirs.create_node("placeholder", "t", name=wish).name for wish in wishes
    ]


def test_nodes_without_a_wish_get_the_names_that_torch_fx_gives() -> None:
    theirs, ours = torch.fx.Graph(), featx.Graph()
    methods = ["add", "__add__", "view", "relu_", "T", "camelCase", "HTTPServer"]
    for graph in (theirs, ours):
        for function in FUNCTIONS * 2:
            graph.call_function(function, (1, 2))
        for method in methods * 2:
            graph.call_method(method, (1,))
        for _ in range(2):
            graph.call_module("layer1.0.conv", (1,))
    assert [node.name for node in ours.nodes] == [node.name for node in theirs.nodes]


def test_second_call_of_relu_gets_suffix_one() -> None:
    names = Namespace()
    assert [names.create_name("relu") for _ in range(3)] == ["relu", "relu_1", "relu_2"]


def test_name_of_a_builtin_starts_at_suffix_one() -> None:
    names = Namespace()
    assert [names.create_name("getattr") for _ in range(2)] == ["getattr_1", "getattr_2"]


def test_none_is_never_a_name() -> None:
    # torch.fx gives it out, and writes `None = ...`.
    assert Namespace().create_name("None") == "None_1"


def test_numbered_wish_that_is_free_is_granted() -> None:
    names = Namespace()
    assert [names.create_name(wish) for wish in ("x_5", "x", "x_5", "x")] == ["x_5", "x", "x_6", "x_7"]


def test_released_name_is_given_out_again() -> None:
    names = Namespace()
    assert [names.create_name("relu"), names.create_name("relu")] == ["relu", "relu_1"]
    names.release("relu")
    assert [names.create_name("relu"), names.create_name("relu")] == ["relu", "relu_2"]


def test_reserved_name_is_never_given_out() -> None:
    names = Namespace()
    names.reserve("self")
    assert names.create_name("self") == "self_1"


@pytest.mark.parametrize(
    ("candidate", "identifier"),
    [("layer1.0", "layer1_0"), ("0", "_0"), ("", "_unnamed"), ("a b-c", "a_b_c"), ("naïve", "na_ve"), ("ok", "ok")],
)
def test_identifier_replaces_what_cannot_stand_in_one(candidate: str, identifier: str) -> None:
    assert identifier_of(candidate) == identifier


@pytest.mark.parametrize(
    ("target", "name"),
    [("relu", "relu"), ("__add__", "add"), (torch.relu, "relu"), (nn.ReLU, "re_lu"), (nn.Linear, "linear")],
)
def test_node_is_named_after_what_it_calls(target: str | Callable[..., Any], name: str) -> None:
    assert name_of_target(target) == name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_qualified_name_is_the_one_of_torch_fx(function: Callable[..., Any]) -> None:
    assert qualified_name(function) == name_in_torch_fx(function).replace("_operator.", "operator.")


@pytest.mark.parametrize(
    "function", [torch.relu, functional.max_pool2d, torch.ops.aten.add.Tensor, torch.fft.fft, nn.ReLU]
)
def test_qualified_name_of_a_torch_function_leads_back_to_it(function: Callable[..., Any]) -> None:
    assert resolve(qualified_name(function)) is function


def test_qualified_name_that_torch_does_not_have_resolves_to_none() -> None:
    assert resolve("torch.nn.no_such.thing") is None
