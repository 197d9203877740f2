"""Code that stands alone: to_folder writes a file that imports torch, and tensors beside it."""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

import featx
from featx.codegen import standalone_checks
from featx.codegen.constructors import constructor_of
from featx.errors import ArgumentTypeError, MissingExtraError
from featx.tracing.guards import guards

X = torch.rand(2, 3, 64, 64)
# numpy is imported where the model calls it.
_IMPORTED = set("__future__ json math pathlib typing torch operator builtins collections numpy".split())


def extractor_of(model: nn.Module, nodes: Any, example: Any = X) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, nodes, example_inputs=example, suppress_diff_warning=True)


def written(module: featx.GraphModule, folder: Path, **options: Any) -> Any:
    """Write a module, check what its file imports, and return the class."""
    module.to_folder(folder, "Written", **options)
    source = (folder / "__init__.py").read_text()
    tree = ast.parse(source)
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else node.names[0].name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert imported <= _IMPORTED
    namespace: dict[str, Any] = {"__file__": str(folder / "__init__.py"), "__name__": "written"}
    exec(compile(source, str(folder / "__init__.py"), "exec"), namespace)
    return namespace["Written"]


def resnet() -> nn.Module:
    return torchvision.models.resnet18(weights=None)


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 12, [1, 1], [1, 2], [4, 4], num_classes=5)


def vit() -> nn.Module:
    return torchvision.models.VisionTransformer(64, 16, 2, 2, 16, 16)


def mobilenet() -> nn.Module:
    return torchvision.models.mobilenet_v3_small(weights=None)


class Odd(nn.Module):
    """Parameters and buffers of its own, a buffer that is not saved, tied weights, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8).double())
        self.register_buffer("shift", torch.rand(8).half())
        self.register_buffer("table", torch.arange(8), persistent=False)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.scale.requires_grad_(False)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x)) * self.scale.float() + self.shift.float() + self.table
        x, _ = self.rnn(x)
        return self.attention(x, x, x)[0] + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor]] = {
    "resnet": (resnet, ["layer2", "layer3.0.add"], X),
    "swin": (swin, ["features.1", "features.3"], X),
    "vit": (vit, ["encoder.layers.encoder_layer_1", "heads"], X),
    "mobilenet": (mobilenet, {"features.4": featx.Feature("pooled", pool="avg"), "output": "logits"}, X),
    "odd": (Odd, ["one", "output"], torch.rand(2, 5, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same_in_both_modes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, nodes, x = MODELS[name]
    extractor = extractor_of(make().eval(), nodes, x)
    copy = written(extractor, tmp_path / "code")()
    assert not copy.training
    for mode in (False, True):
        torch.manual_seed(1)
        expected = extractor.train(mode)(x)
        torch.manual_seed(1)
        found = copy.train(mode)(x)
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    # Train mode has changed the statistics of both.
    assert all(torch.equal(copy.state_dict()[key], value) for key, value in extractor.state_dict().items())


class AnotherTensorByMode(nn.Module):
    """Has tensors that are neither parameters nor buffers, one for each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = [torch.arange(4.0), torch.arange(4.0) * 10]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shifts[0 if self.training else 1]


def test_a_tensor_that_stands_in_the_code_of_each_mode(tmp_path: Path) -> None:
    model, x = AnotherTensorByMode(), torch.rand(2, 4)
    copy = written(extractor_of(model, ["output"], x), tmp_path / "code")()
    for mode in (True, False):
        assert torch.equal(copy.train(mode)(x)["output"], model.train(mode)(x))


@pytest.mark.slow
def test_the_state_is_that_of_the_module(tmp_path: Path) -> None:
    extractor = extractor_of(Odd().eval(), ["output"], torch.rand(2, 5, 8))
    copy = written(extractor, tmp_path / "code")()
    assert {name: value.dtype for name, value in copy.named_parameters()} == {
        name: value.dtype for name, value in extractor.named_parameters()
    }
    assert not copy.scale.requires_grad
    assert copy.one.weight is copy.two.weight
    assert "table" not in copy.state_dict()
    assert "table" in dict(copy.named_buffers())
    copy.load_state_dict(extractor.state_dict())
    copy(torch.rand(2, 5, 8))["output"].sum().backward()
    assert copy.rnn.weight_ih_l0.grad is not None


@pytest.mark.slow
def test_the_tensors_are_a_safetensors_file(tmp_path: Path) -> None:
    extractor = extractor_of(resnet().eval(), ["layer1"])
    cls = written(extractor, tmp_path / "code")
    state = load_file(tmp_path / "code" / "weights.safetensors")
    assert state.keys() == extractor.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in extractor.state_dict().items())
    moved = tmp_path / "elsewhere.safetensors"
    (tmp_path / "code" / "weights.safetensors").rename(moved)
    assert torch.equal(cls(moved)(X)["layer1"], extractor(X)["layer1"])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
)
def test_tensors_of_any_dtype_and_shape_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    tensors = {
        "full": torch.randint(0, 2, (3, 4)).to(dtype), "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
    }  # fmt: skip
    save_file(tensors, str(tmp_path / "a.safetensors"))
    found = standalone_checks.read_safetensors(tmp_path / "a.safetensors")
    assert all(found[key].dtype == dtype and torch.equal(found[key], tensors[key]) for key in tensors)


@pytest.mark.slow
def test_it_runs_where_featx_is_not(tmp_path: Path) -> None:
    extractor = extractor_of(swin().eval(), ["features.3"])
    extractor.to_folder(tmp_path / "alone", "Swin")
    torch.save((X, extractor(X)), tmp_path / "values.pt")
    program = (
        "import sys, torch; sys.path.insert(0, '.'); from alone import Swin; x, expected = torch.load('values.pt');"
        "assert torch.equal(Swin()(x)['features.3'], expected['features.3']);"
        "assert not {'featx', 'torchvision', 'safetensors'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_other_sizes_and_what_the_model_refuses(tmp_path: Path) -> None:
    extractor = extractor_of(resnet().eval(), ["layer2"])
    copy = written(extractor, tmp_path / "code")()
    x = torch.rand(1, 3, 96, 32)
    assert torch.equal(copy(x)["layer2"], extractor(x)["layer2"])

    class ByLength(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((x[i] for i in range(x.shape[0])), torch.zeros(()))

    copy = written(extractor_of(ByLength(), ["output"], torch.rand(3)), tmp_path / "other")()
    assert torch.equal(copy(torch.ones(3))["output"], torch.tensor(3.0))
    with pytest.raises(RuntimeError, match="the input has shape"):
        copy(torch.ones(4))


@pytest.mark.slow
def test_it_says_what_it_is(tmp_path: Path) -> None:
    written(extractor_of(resnet().eval(), {"layer2": "C3"}), tmp_path / "code")
    source = (tmp_path / "code" / "__init__.py").read_text()
    assert "C3   layer2  Sequential  2x128x8x8  NCHW" in str(ast.get_docstring(ast.parse(source)))
    assert "put(self, 'conv1', nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False))" in source
    assert str(Path(torchvision.__file__).parent.parent) not in source


@pytest.mark.slow
def test_a_graph_module_is_followed_on_an_example(tmp_path: Path) -> None:
    module = featx.trace(swin().eval(), X)
    copy = written(module, tmp_path / "code", example_inputs=X, pickled=False)()
    assert torch.equal(copy(X), module(X))


class ComputesWithNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = int(np.ceil(x.shape[2] / 8) * 8)
        x = nn.functional.pad(self.conv(x), (0, 0, 0, rows - x.shape[2]))
        if (np.array(x.shape[2:]) % 4).any():
            raise ValueError("sides are multiples of 4")
        return x.view(x.shape[0], np.prod(x.shape[1:])) / np.sqrt(x.shape[1])


def test_what_numpy_computes_of_sizes_is_written_down(tmp_path: Path) -> None:
    model = ComputesWithNumpy().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X, adaptive=False)
    stands_alone = written(extractor, tmp_path)().eval()
    for module in (stands_alone, pickle.loads(pickle.dumps(extractor)), copy.deepcopy(extractor)):
        for x in (X, torch.rand(3, 3, 53, 32)):
            assert torch.equal(module(x)["output"], model(x))
    with pytest.raises(RuntimeError, match="not_equal"):
        stands_alone(torch.rand(1, 3, 8, 9))


def test_a_mode_that_could_not_be_traced_raises(tmp_path: Path) -> None:
    class EvalOnly(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise ValueError("no")
            return x.exp()

    extractor = extractor_of(EvalOnly().eval(), ["exp"], torch.rand(2))
    copy = written(extractor, tmp_path / "code")()
    assert torch.equal(copy(torch.ones(2))["exp"], torch.ones(2).exp())
    with pytest.raises(RuntimeError, match="no code for train mode"):
        copy.train()(torch.ones(2))


@torch.library.custom_op("featx_standalone_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_what_needs_more_than_torch_is_refused_or_pickled(tmp_path: Path) -> None:
    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.featx_standalone_test.twice(x)

    extractor = extractor_of(Custom(), ["output"], torch.rand(2))
    with pytest.raises(ArgumentTypeError, match=r"cannot stand alone: 'twice.*' calls .*twice"):
        extractor.to_folder(tmp_path / "code", pickled=False)
    assert not (tmp_path / "code").exists()
    with pytest.warns(UserWarning, match=r"imports featx and other libraries.*'twice.*' calls .*twice"):
        extractor.to_folder(tmp_path / "code")
    assert (tmp_path / "code" / "state.pt").exists()
    extractor.to_folder(tmp_path / "meant", pickled=True)
    assert (tmp_path / "meant" / "state.pt").exists()


@pytest.mark.slow
def test_without_safetensors_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fails(name: str, *args: Any) -> ModuleType:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args)

    extractor = extractor_of(resnet().eval(), ["layer1"])
    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(MissingExtraError, match="pip install safetensors"):
        extractor.to_folder(tmp_path / "code")
    assert not (tmp_path / "code").exists()


MADE: dict[str, nn.Module] = {
    "nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)": nn.Conv2d(3, 8, 3, 2, 1, bias=False),
    'nn.Conv2d(3, 8, (3, 1), padding="same")': nn.Conv2d(3, 8, (3, 1), padding="same"),
    "nn.Linear(3, 4)": nn.Linear(3, 4),
    "nn.Linear(3, 4, bias=False)": nn.Linear(3, 4, bias=False),
    "nn.BatchNorm1d(5, momentum=None)": nn.BatchNorm1d(5, momentum=None),
    "nn.BatchNorm1d(5, affine=False)": nn.BatchNorm1d(5, affine=False),
    "nn.LayerNorm(5, eps=1e-06)": nn.LayerNorm(5, eps=1e-6),
    "nn.LayerNorm((2, 5), bias=False)": nn.LayerNorm((2, 5), bias=False),
    "nn.GroupNorm(2, 4)": nn.GroupNorm(2, 4),
    "nn.Embedding(5, 3, padding_idx=0)": nn.Embedding(5, 3, padding_idx=0),
    "nn.GELU(approximate='tanh')": nn.GELU("tanh"),
    "nn.Identity()": nn.Identity(1, 2),
    "nn.Upsample(scale_factor=2.0, mode='bilinear', align_corners=False)": nn.Upsample(None, 2, "bilinear", False),
    "nn.AdaptiveAvgPool2d((1, None))": nn.AdaptiveAvgPool2d((1, None)),
    "nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True)": nn.MultiheadAttention(
        8, 2, bias=False, add_bias_kv=True
    ),
    "nn.LSTM(3, 4, num_layers=2, bidirectional=True)": nn.LSTM(3, 4, 2, bidirectional=True),
    'nn.Threshold(0.1, float("inf"))': nn.Threshold(0.1, float("inf")),
}


@pytest.mark.parametrize("expected", MADE)
def test_constructors_of_torchs_modules(expected: str) -> None:
    assert str(constructor_of(MADE[expected])).replace("'", '"') == expected.replace("'", '"')


class OwnLinear(nn.Linear):
    pass


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, args, output: output + 1)
    return module


def overridden() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


OTHER: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: OwnLinear(2, 2),
    "a hook": hooked,
    "a forward of its own": overridden,
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "children": lambda: nn.Sequential(nn.ReLU()),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_modules_have_no_constructor(name: str) -> None:
    assert constructor_of(OTHER[name]()) is None


CHECKS: dict[str, list[tuple[Any, ...]]] = {
    "check_decision": [(1, 1, "x"), (1, 2, "x"), (float("nan"), float("nan"), "x"), (torch.tensor(3), 3, "x")],
    "check_constant": [
        (1, 1, "x"), (True, 1, "x"), ("a", "a", "x"), (None, None, "x"), (torch.tensor(1), 1, "x"),
        (float("nan"), float("nan"), "x"), ((float("nan"),), (float("nan"),), "x"), (0.0, -0.0, "x"),
        ((1, [0.0]), (1, [-0.0]), "x"), ({"a": True}, {"a": 1}, "x"), ((1, 2), (1,), "x"),
    ],
    "check_not_given": [(None, "x"), (0, "x")],
    "check_dtype": [(torch.float32, [torch.float32], "x"), (torch.float16, [torch.float32], "x")],
    "check_is_tensor": [(torch.ones(1), "x"), (1, "x"), (None, "x")],
    "check_rank": [(torch.ones(1), 1, "x"), (torch.ones(1), 2, "x")],
    "check_size": [
        (torch.ones(2, 3), 1, 3, "x"), (torch.ones(2, 3), 1, 2, "x"), (torch.ones(2, 0), 1, None, "x"),
        (torch.ones(2), 1, None, "x"), (torch.ones(2, 5), 1, None, "x"),
    ],
    "check_aliases": [
        ((X, X), None), ((X, X + 1), None), ((1, 1), None), ((X, {"a": [X]}), None), ((X, [X]), (0, 0)),
        ((X, X + 1), (0, 0)), ((X, X, X + 1), (0, 0, 2)), ((X, X + 1, X), (0, 0, 2)),
        ((X, X[:, 1:]), None, True), ((X[:1, :1], X[:1, 2:]), None, True), ((X, X.transpose(2, 3)), None, True),
        ((X, X[:, 1:]), None),
    ],
    "check_same_items": [((X, X), (0, 0), "x"), ([X, X + 1], (0, 0), "x"), ({"a": X, "b": X + 1}, (0, 1), "x")],
    "check_form": [
        ((X, [1, None, True]), ("tuple", "tensor of 4 dimensions", ("list", "int", None, True)), "x"),
        ({"a": X}, ("dict", ("a", "tensor of 4 dimensions")), "x"), (X, "tensor of 3 dimensions", "x"),
        ((X,), ("list", "tensor of 4 dimensions"), "x"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_checks_raise_where_those_of_featx_do(name: str) -> None:
    def raises(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        try:
            function(*args)
        except RuntimeError:
            return True
        return False

    for args in CHECKS[name]:
        own = getattr(standalone_checks, name)
        assert raises(own, args) is raises(getattr(guards, name), args), args


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "efficientnet_b0", "convnext_atto", "swin_tiny_patch4_window7_224", "maxvit_pico_rw_256"],
)
def test_models_of_timm(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()
    x = torch.rand(1, *model.pretrained_cfg["input_size"])
    backbone = featx.create_backbone(model)
    copy = written(backbone, tmp_path / "code", pickled=False)()
    found, expected = copy(x), backbone(x)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "names"), [("layer2", ["layer3.0", "output"]), ("avgpool", ["output"])])
def test_extractor_that_starts_in_the_middle_stands_alone(start: str, names: list[str], tmp_path: Path) -> None:
    model = resnet().eval()
    extractor = featx.create_feature_extractor(model, names, inputs=[start], example_inputs=X)
    value = featx.create_feature_extractor(model, [start], example_inputs=X)(X)[start].detach()
    alone = written(extractor, tmp_path / "code")()
    assert {key: value.tolist() for key, value in alone(value).items()} == {
        key: value.tolist() for key, value in extractor(value).items()
    }


@pytest.mark.slow
def test_named_tuple_of_another_library_is_written_down(tmp_path: Path) -> None:
    model = torchvision.models.googlenet(weights=None, init_weights=False, num_classes=5)
    alone = written(extractor_of(model, ["output"]), tmp_path / "code")().train()
    result = alone(X)["output"]
    assert type(result).__name__ == "GoogLeNetOutputs"
    assert result._fields == ("logits", "aux_logits2", "aux_logits1")
    assert [each.shape for each in result] == [(2, 5)] * 3


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    count: int


class OnBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layer(batch.image) * 2


def test_inputs_that_are_objects_have_the_form_that_they_had(tmp_path: Path) -> None:
    model, batch = OnBatches().eval(), Batch(torch.rand(2, 3), 1)
    extractor = extractor_of(model, ["mul"], (batch,))
    copy = written(extractor, tmp_path / "code", pickled=False)()
    copy.load_state_dict(extractor.state_dict())
    assert torch.equal(copy(batch)["mul"], model(batch))


class PassesOn(OnBatches):
    def forward(self, **kwargs: Any) -> torch.Tensor:
        return self.layer(kwargs["x"]) * kwargs["scale"]


def test_options_among_the_rest_of_the_keywords_are_written_down(tmp_path: Path) -> None:
    model, x = PassesOn().eval(), torch.rand(2, 3)
    extractor = extractor_of(model, ["mul"], {"x": x, "scale": 2})
    copy = written(extractor, tmp_path / "code", pickled=False)()
    copy.load_state_dict(extractor.state_dict())
    assert torch.equal(copy(x=x)["mul"], model(x=x, scale=2))


class Pair(NamedTuple):
    first: torch.Tensor
    others: list[torch.Tensor]


def test_copies_of_named_tuples_are_such_and_one_tensor_stays_one() -> None:
    x = torch.rand(2)
    found = standalone_checks.clone_tensors(Pair(x, [x]))
    assert type(found) is Pair
    assert found.first is found.others[0]
    assert found.first is not x
    assert torch.equal(found.first, x)


@pytest.mark.parametrize("function", [torch.flatten, lambda value: value * 2])
def test_function_of_the_user_that_is_applied_to_a_feature_stands_alone(function: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    extractor = extractor_of(model, {"0": featx.Feature("v", apply=function), "1": "relu"})
    found = written(extractor, tmp_path)()(X)
    with torch.no_grad():
        assert torch.equal(found["v"], function(model[0](X)))
        assert torch.equal(found["relu"], model(X))


class Embeds(nn.Module):
    """Its file is needed to build it, so that it is looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class OfIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeds, self.last = Embeds(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embeds((x * 9).long()))


def test_an_extractor_that_begins_at_integers(tmp_path: Path) -> None:
    model = OfIds().eval()
    extractor = featx.create_feature_extractor(
        model, ["embeds", "last"], inputs=["long"], example_inputs=torch.rand(2, 3), suppress_diff_warning=True
    )
    alone = written(extractor.eval(), tmp_path / "code")()
    ids = torch.tensor([[1, 9], [0, 4]])
    assert torch.equal(alone(ids)["last"], model.last(model.embeds(ids)))


# -- the tensors and the modes -----------------------------------------------------------------------------------------


class Weighs(nn.Module):
    """Multiplies by a parameter or a buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        if tensor.is_floating_point() or tensor.is_complex():
            self.weight = nn.Parameter(tensor)
        else:
            self.register_buffer("weight", tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to(torch.complex64 if self.weight.is_complex() else torch.float32)


DTYPES = [torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_rare_dtypes_are_written_and_train_as_they_did(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.rand(2, 3)
    extractor = extractor_of(Weighs(torch.tensor([1.0, 0.0, 2.0]).to(dtype)), ["output"], x)
    copy = written(extractor, tmp_path / "code")()
    assert copy.weight.dtype is dtype
    assert copy.weight.requires_grad is extractor.weight.requires_grad
    assert torch.equal(copy(x)["output"], extractor(x)["output"])


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(4))
        self.register_buffer("head", self.all[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all.add_(1)
        return x + self.head.sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Weighs(torch.ones(3, dtype=torch.complex128)), "torch.complex128"), (Views(), "'head' and 'all' share memory")],
)
def test_tensors_that_no_file_holds_are_refused(model: nn.Module, reason: str, tmp_path: Path) -> None:
    extractor = extractor_of(model, ["output"], torch.rand(2, 3) if isinstance(model, Weighs) else torch.rand(2))
    with pytest.raises(featx.ArgumentTypeError, match=reason):
        extractor.to_folder(tmp_path / "code", "Code", pickled=False)
    assert not (tmp_path / "code").exists()


class ReadsStrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.register_buffer("turned", torch.rand(3, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).permute(0, 2, 3, 1).view(-1, 8) @ self.turned


def test_weights_keep_their_strides(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    extractor = extractor_of(ReadsStrides(), ["output"], x)
    copy = written(extractor, tmp_path / "code")()
    assert copy.turned.stride() == (1, 8)
    assert torch.equal(copy(x)["output"], extractor(x)["output"])


class WritesWhatIsStrided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = (x * 1)[:, ::2]
        columns.add_(1)
        return columns.as_strided((2,), (2,))


def test_copies_of_what_is_written_later_keep_their_strides(tmp_path: Path) -> None:
    model, x = WritesWhatIsStrided(), torch.tensor([[0.0, 4.0, 2.0, 8.0]])
    found = written(extractor_of(model, ["getitem", "output"], x), tmp_path)()(x)
    assert found["output"].tolist() == model(x).tolist() == [1.0, 3.0]
    assert found["getitem"].tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("name", ["\U0001d465", "it's", "\u2603"])
def test_names_beyond_ascii_are_written_as_they_are(name: str, tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    extractor = extractor_of(model, ["output"], x := torch.rand(1, 2))
    assert torch.equal(written(extractor, tmp_path)()(x)["output"], model(x))


class AsksForMode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x * 3


def test_modules_keep_their_modes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
    model[1].eval()
    x = torch.rand(3, 4)
    extractor = extractor_of(model, ["0", "1", "2.0"], x)
    copy = written(extractor, tmp_path / "code")()
    assert copy.training
    assert not copy.get_submodule("1").training
    assert torch.equal(copy(x)["1"], model[1](model[0](x)))
    opened = nn.Sequential(nn.Linear(4, 4), AsksForMode())
    opened[1].eval()
    extractor = extractor_of(opened, ["1.mul"], x)
    with pytest.raises(featx.ArgumentTypeError, match="are in another mode than the model"):
        extractor.to_folder(tmp_path / "other", "Code", pickled=False)


def test_code_that_the_graph_edits_is_written_as_it_is_edited(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    extractor = featx.create_feature_extractor(net, ["0"], example_inputs=torch.ones(4))
    extractor.graph.on_generate_code(lambda _: lambda body: ["return 'transformed'\n", *body])
    assert written(extractor, tmp_path / "code", pickled=False)()(torch.ones(4)) == "transformed"
