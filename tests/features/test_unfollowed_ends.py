"""Models whose forward ends in code that cannot be followed, such as numpy: what comes before it is listed."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Detector(nn.Module):
    """Turns its maps into numpy arrays and picks boxes among them, as many detectors do in eval mode."""

    def __init__(self, *, always: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
        self.head = nn.Conv2d(16, 5, 1)
        self.always = always

    def forward(self, x: torch.Tensor) -> Any:
        maps = torch.sigmoid(self.head(self.body(x)))
        if self.training and not self.always:
            return maps * 2
        scores = maps.detach().cpu().numpy()
        return [{"label": int(np.argmax(each.sum((1, 2)))), "score": float(each.max())} for each in scores]


UP_TO_NUMPY = ["x", "body.0", "body.1", "body.2", "head", "sigmoid", "detach", "cpu"]


def test_names_up_to_there_are_listed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"cannot be followed to its end.*numpy array at .*test_unfollowed_ends.py"):
        names = featx.get_graph_node_names(Detector().eval(), example_inputs=X)
    assert names == (UP_TO_NUMPY, UP_TO_NUMPY)


def test_the_warning_can_be_switched_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = featx.get_graph_node_names(Detector().eval(), None, True, example_inputs=X)
    assert names[1] == UP_TO_NUMPY


def test_a_mode_that_can_be_followed_is_listed_to_its_end() -> None:
    model = Detector(always=False).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train, evaluated = featx.get_graph_node_names(model, example_inputs=X)
    assert [str(each.message).partition(".")[0].split(":")[0] for each in caught] == [
        "forward of Detector cannot be followed to its end, and what it computes from here on has no names",
        "The nodes of train mode and of eval mode differ",
    ]
    assert train == ["x", "body.0", "body.1", "body.2", "head", "sigmoid", "mul"]
    assert evaluated == UP_TO_NUMPY


def test_each_name_gives_what_a_hook_sees() -> None:
    model = Detector().eval()
    names = [name for name in UP_TO_NUMPY if name in dict(model.named_modules())]
    seen: dict[str, torch.Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.clone()}))
    model(X)
    extractor = featx.create_feature_extractor(Detector().eval(), names, example_inputs=X)
    extractor.load_state_dict(model.state_dict())
    assert all(torch.equal(value, seen[name]) for name, value in extractor(X).items())


def test_the_table_of_nodes_ends_there_and_says_so() -> None:
    table = featx.nodes(Detector().eval(), X)
    assert table["body"].shape == (2, 16, 4, 4)
    assert table["head"].parameters == 85
    assert table.note is not None
    assert "cannot be followed to its end" in table.note
    assert table.note in str(table)


def test_a_backbone_takes_its_maps_from_before() -> None:
    model = Detector().eval()
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X)
    half, quarter = backbone(X).values()
    expected = torch.relu(model.body[0](X))
    assert torch.equal(half, expected)
    assert torch.equal(quarter, model.body[2](expected))


def test_a_misspelled_name_is_told_to_be_one() -> None:
    with pytest.raises(featx.NodeNameError, match=r"No node 'heat'.*numpy array.*Did you mean 'head'"):
        featx.create_feature_extractor(Detector().eval(), ["heat"], example_inputs=X)


def test_what_the_model_returns_is_refused_as_before() -> None:
    with pytest.raises(featx.TraceError, match="numpy array"):
        featx.create_feature_extractor(Detector().eval(), ["head", "output"], example_inputs=X)
    with pytest.raises(featx.TraceError, match="numpy array"):
        featx.trace(Detector().eval(), X)


class CallsItself(nn.Module):
    """Has a `__call__` of its own, so that it is never kept whole, and goes on with numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x * 2)

    def forward(self, x: torch.Tensor) -> Any:
        return np.sort(self.first(x).detach().numpy())


class Around(nn.Module):
    """Ends in the middle of a module that cannot be kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = CallsItself()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.before(x))


def test_a_module_that_breaks_off_has_no_row() -> None:
    table = featx.nodes(Around().eval(), torch.rand(2, 8))
    assert "before" in table.names
    assert "inner.first" in table.names
    assert "inner" not in table.names


def test_an_error_of_the_model_itself_is_raised() -> None:
    with pytest.raises(RuntimeError, match="channels"):
        featx.get_graph_node_names(Detector().eval(), example_inputs=torch.rand(2, 4, 16, 16))


@pytest.mark.slow
def test_the_command_line_lists_them_too(tmp_path: Any) -> None:
    source = "import torch\nfrom test_unfollowed_ends import Detector\n\ndef build():\n    return Detector().eval()\n"
    (tmp_path / "built.py").write_text(source)
    command = [sys.executable, "-m", "featx", "nodes", "built:build", "--input", "2x3x16x16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=_with_path(tmp_path), check=False)
    assert done.returncode == 0, done.stderr
    assert "head" in done.stdout
    assert "cannot be followed to its end" in done.stdout + done.stderr


def _with_path(folder: Any) -> dict[str, str]:
    places = [str(folder), str(Path(__file__).parent), str(Path(featx.__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


class Momentum(nn.Module):
    """In train mode, it assigns `data` of parameters before it computes what both modes return, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = torch.nn.functional.normalize(self.query(x), dim=1)
        if self.training:
            self.key.weight.data = self.key.weight.data * 0.99 + self.query.weight.data * 0.01
        return query @ torch.nn.functional.normalize(self.key(x), dim=1).t()


@pytest.mark.filterwarnings("ignore:The nodes of train mode and of eval mode differ:UserWarning")
@pytest.mark.parametrize("name", ["normalize", "normalize_1", "matmul", "output"])
def test_a_name_of_eval_mode_that_lies_behind_the_end_in_train_mode(name: str) -> None:
    model, x = Momentum().eval(), torch.rand(5, 4)
    extractor = featx.create_feature_extractor(model, [name], example_inputs=x)
    query, key = (torch.nn.functional.normalize(layer(x), dim=1) for layer in (model.query, model.key))
    values = {"normalize": query, "normalize_1": key, "matmul": query @ key.t(), "output": model(x)}
    assert torch.equal(extractor(x)[name], values[name])
    if name != "normalize":
        with pytest.raises(featx.TraceError, match="'data' of a tensor is assigned"):
            extractor.train()(x)


def test_a_misspelled_name_behind_the_end_in_train_mode() -> None:
    with pytest.raises(featx.NodeNameError, match=r"Did you mean"):
        featx.create_feature_extractor(Momentum().eval(), ["matmull"], example_inputs=torch.rand(5, 4))


class Headless(nn.Module):
    """Raises an error of its own behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x).relu()
        raise ValueError("there is no head")


@pytest.mark.parametrize("name", ["layer", "layer.linear"])
def test_what_lies_before_an_error_of_the_model_can_be_asked_for(name: str) -> None:
    model, x = Headless().eval(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, [name], example_inputs=x)
    assert torch.equal(extractor(x)[name], model.layer(x))
