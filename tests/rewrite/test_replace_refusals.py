"""What replace_pattern refuses, and that it then leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer import absolute, neg_relu, relu, x
from torch import nn

import featx


def failing(*_: Any) -> Any:
    raise KeyError("mine")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no module": ({"gm": nn.ReLU()}, featx.ArgumentTypeError, "gm must be a featx GraphModule, got ReLU"),
    "no replacement": ({"replacement": None}, featx.ArgumentTypeError, "give a replacement, or a replacement_callback"),
    "pattern of another kind": ({"pattern": 3}, featx.ArgumentTypeError, "pattern must be a function.*got int"),
    "replacement of another kind": ({"replacement": "x"}, featx.ArgumentTypeError, "replacement must be .*got str"),
    "no such option": ({"match_modules": "name"}, featx.ArgumentTypeError, "'path', 'type' or 'config', got 'name'"),
    "more inputs": (
        {"replacement": lambda x, y: x},
        featx.PatternError,
        r"has the inputs \(x\) and the replacement \(x, y\); give it as many",
    ),
    "more outputs": (
        {"replacement": lambda x: (x, x)},
        featx.PatternError,
        r"returns \(neg\) and the replacement \(x, x\); let both",
    ),
    "pattern that branches": (
        {"pattern": lambda x: x if x else -x},
        featx.ControlFlowError,
        "the truth of a traced value",
    ),
    "filter that raises": ({"match_filters": [failing]}, KeyError, "mine"),
    "callback that raises": ({"replacement_callback": failing}, KeyError, "mine"),
    "callback that returns nothing": (
        {"replacement_callback": lambda *_: None},
        featx.ArgumentTypeError,
        "got NoneType",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_leaves_the_module_as_it_was(name: str) -> None:
    changes, error, message = REFUSED[name]
    module = featx.symbolic_trace(lambda x: neg_relu(neg_relu(x)))
    before = str(module.graph)
    arguments = {"gm": module, "pattern": neg_relu, "replacement": absolute, **changes}
    with pytest.raises(error, match=message):
        featx.replace_pattern_with_filters(**arguments)
    assert str(module.graph) == before
    assert torch.equal(module(x), neg_relu(neg_relu(x)))


def test_graph_is_not_its_own_pattern_or_replacement() -> None:
    module = featx.symbolic_trace(neg_relu)
    for pattern, replacement in ((module, absolute), (neg_relu, module.graph)):
        with pytest.raises(featx.PatternError, match="give a deepcopy"):
            featx.replace_pattern(module, pattern, replacement)


def test_malformed_graph_is_refused() -> None:
    module = featx.symbolic_trace(neg_relu)
    module.graph.find_nodes(op="call_function", target=torch.relu)[0].name = "neg"
    with pytest.raises(featx.GraphError, match="two nodes are named 'neg'"):
        featx.replace_pattern(module, relu, absolute)
