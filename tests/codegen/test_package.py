# pyright: reportMissingParameterType=false
# Annotations would be a part of the generated code that is compared here.
from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import Graph, GraphModule, symbolic_trace
from featx.errors import ArgumentTypeError
from tests.hostile import HOSTILE, UNUSUAL, Loud, nothing_runs

# What is written here needs more than torch.
pytestmark = pytest.mark.filterwarnings("ignore:the code in .* imports featx:UserWarning")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "class": nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())})
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.plain = torch.rand(3)

    def forward(self, x, power: float = -math.inf):
        x = self.layers["class"](self.layers["a"](x)) * self.scale + self.offset + self.hidden + self.plain
        return functional.max_pool1d(x.clamp(min=power), 2), math.sqrt(x.shape[0])


@pytest.fixture
def import_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """A function that writes a module to a folder and imports it from there."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_and_import(module: GraphModule, folder: str, *name: str) -> ModuleType:
        module.to_folder(tmp_path / folder, *name)
        importlib.invalidate_caches()
        return importlib.import_module(folder)

    return write_and_import


@pytest.mark.parametrize("training", [False, True])
def test_package_gives_equal_results(import_package: Callable[..., ModuleType], training: bool) -> None:
    model = Model().train(training)
    traced = symbolic_trace(copy.deepcopy(model))
    loaded = import_package(traced, f"package_training_{training}".lower()).FxModule()
    x = torch.randn(4, 3)
    for result, expected in zip(loaded(x), model(x), strict=True):
        assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))
    assert loaded.training is training


def test_package_keeps_the_state_dict(import_package: Callable[..., ModuleType]) -> None:
    model = Model()
    loaded = import_package(symbolic_trace(model), "package_state").FxModule()
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    assert isinstance(loaded.scale, nn.Parameter)


def test_package_keeps_tensors_that_stood_in_the_graph(import_package: Callable[..., ModuleType]) -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), torch.arange(3))))
    loaded = import_package(GraphModule(nn.Module(), graph), "package_literal").FxModule()
    assert loaded(1).tolist() == [1, 2, 3]
    assert list(loaded.state_dict()) == []


def test_package_reads_attributes_that_are_not_tensors(import_package: Callable[..., ModuleType]) -> None:
    model = nn.Module()
    model.settings = {"power": 2}
    graph = Graph()
    graph.output(graph.get_attr("settings"))
    assert import_package(GraphModule(model, graph), "package_plain").FxModule()() == {"power": 2}


def test_class_gets_the_name_that_was_asked_for(import_package: Callable[..., ModuleType]) -> None:
    package = import_package(symbolic_trace(nn.ReLU()), "package_named", "Rectifier")
    assert package.Rectifier()(torch.tensor(-1.0)).item() == 0.0


def test_package_does_not_need_featx(tmp_path: Path) -> None:
    symbolic_trace(Model()).to_folder(tmp_path / "package")
    assert "import featx" not in (tmp_path / "package" / "module.py").read_text()
    assert b"featx" not in (tmp_path / "package" / "state.pt").read_bytes()


def test_written_code_is_the_golden(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    symbolic_trace(Model()).to_folder(tmp_path / "package")
    golden("package_module", (tmp_path / "package" / "module.py").read_text())


def test_module_is_not_changed_by_writing_it(tmp_path: Path) -> None:
    traced = symbolic_trace(Model())
    before = (str(traced), list(traced.__dict__))
    traced.to_folder(tmp_path / "package")
    assert (str(traced), list(traced.__dict__)) == before


@pytest.mark.parametrize("value", [lambda x: x, object()], ids=["lambda", "object"])
def test_what_cannot_be_imported_is_refused_and_nothing_is_written(tmp_path: Path, value: Any) -> None:
    graph = Graph()
    graph.output(value)
    with pytest.raises(ArgumentTypeError, match="cannot write the global"):
        GraphModule(nn.Module(), graph).to_folder(tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_names_that_a_class_body_would_read_as_its_own_are_kept(import_package: Callable[..., ModuleType]) -> None:
    model = nn.Module()
    model._modules["__layer"] = nn.ReLU()
    graph = Graph()
    x = graph.placeholder("__x")
    value = graph.call_function(collected, (graph.call_module("__layer", (x,)),), {"__key": x})
    graph.output(graph.call_function(dict, (), {"__value": value}))
    package = import_package(GraphModule(model, graph), "package_private")
    assert package.FxModule()(__x=torch.tensor(1.0)) == {"__value": (1.0, {"__key": 1.0})}


def collected(value: Any, **kwargs: Any) -> Any:
    return value, kwargs


def test_builtin_that_an_input_hides_is_imported(import_package: Callable[..., ModuleType]) -> None:
    graph = Graph()
    graph.output((graph.placeholder("slice"), slice(1, 2), "\u00fcn\u00ef \u2603 \ud800"))
    package = import_package(GraphModule(nn.Module(), graph), "package_hidden")
    assert package.FxModule()(3) == (3, slice(1, 2), "\u00fcn\u00ef \u2603 \ud800")


@pytest.mark.parametrize(
    "name", [*HOSTILE, "", "a b", "class", "torch", "Path", "super", "math_sqrt", "\ud800", "\ufb01"]
)
def test_class_that_cannot_have_the_name_is_refused(tmp_path: Path, name: str) -> None:
    graph = Graph()
    graph.output(graph.call_function(math.sqrt, (graph.placeholder("x"),)))
    with pytest.raises(ArgumentTypeError, match="cannot write a class named"):
        GraphModule(nn.Module(), graph).to_folder(tmp_path / "package", name)
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("text", [*HOSTILE, *UNUSUAL, Loud("a", HOSTILE[0])])
def test_function_is_imported_by_a_name_or_refused(tmp_path: Path, text: str) -> None:
    def function() -> None:
        raise AssertionError

    function.__module__, function.__name__ = text, str.__str__(text)
    graph = Graph()
    graph.output(graph.call_function(function))
    module = GraphModule(nn.Module(), graph)
    with nothing_runs():
        try:
            module.to_folder(tmp_path / "package")
        except ArgumentTypeError:
            return
        with pytest.raises(ImportError):
            exec((tmp_path / "package" / "module.py").read_text(encoding="utf-8"), {"__file__": "module.py"})


def test_function_that_is_no_longer_what_its_name_leads_to_is_refused(tmp_path: Path) -> None:
    def sqrt(x: float) -> float:
        return x

    sqrt.__module__, sqrt.__qualname__ = "math", "sqrt"
    graph = Graph()
    graph.output(graph.call_function(sqrt, (graph.placeholder("x"),)))
    with pytest.raises(ArgumentTypeError, match=r"math\.sqrt is another object"):
        GraphModule(nn.Module(), graph).to_folder(tmp_path / "package")


def test_method_of_a_class_is_imported_through_the_class(
    import_package: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_functions.py").write_text(
        "import torch\n"
        "class Sign(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): return torch.sign(x)\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad): return grad\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("own_functions")
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(own.Sign.apply, (x,)))
    written = import_package(GraphModule(nn.Module(), graph), "package_of_method", "Written")
    value = torch.randn(4, requires_grad=True)
    written.Written()(value).sum().backward()
    assert torch.equal(value.grad, torch.ones(4))  # what its backward gives; that of torch.sign is 0
