"""Feature: what is done to a value before an extractor returns it."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx
from featx import Feature

X = torch.rand(2, 3, 32, 48)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


@pytest.fixture(scope="module")
def maps(model: nn.Module) -> torch.Tensor:
    """What layer3 returns, as a hook sees it."""
    seen: list[torch.Tensor] = []
    handle = model.layer3.register_forward_hook(lambda module, args, output: seen.append(output))
    model(X)
    handle.remove()
    return seen[0]


def extractor_of(model: nn.Module, nodes: Any, **options: Any) -> featx.DualGraphModule:
    options.setdefault("example_inputs", X)
    extractor = featx.create_feature_extractor(model, nodes, suppress_diff_warning=True, **options)
    assert isinstance(extractor, featx.DualGraphModule)
    return extractor


def gem(x: torch.Tensor) -> torch.Tensor:
    return (x.clamp(min=1e-6) ** 3).mean((2, 3)) ** (1 / 3)


CASES: dict[str, tuple[Feature, Callable[[torch.Tensor], torch.Tensor], str | None]] = {
    "nothing": (Feature("key"), lambda x: x, "NCHW"),
    "average": (Feature("key", pool="avg"), lambda x: x.mean((2, 3)), "NC"),
    "maximum": (Feature("key", pool="max"), lambda x: x.amax((2, 3)), "NC"),
    "generalized mean": (Feature("key", pool="gem"), gem, "NC"),
    "layout": (Feature("key", layout="NHWC"), lambda x: x.permute(0, 2, 3, 1), "NHWC"),
    "same layout": (Feature("key", layout="NCHW"), lambda x: x, "NCHW"),
    "flat": (Feature("key", flatten=True), lambda x: x.flatten(1), None),
    "half": (Feature("key", dtype=torch.float16), lambda x: x.half(), "NCHW"),
    "all": (
        Feature("key", detach=True, pool="avg", dtype=torch.float64, flatten=True),
        lambda x: x.detach().mean((2, 3)).double(),
        "NC",
    ),
    "function": (Feature("key", apply=torch.sigmoid, pool="max"), lambda x: torch.sigmoid(x.amax((2, 3))), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_done_in_the_graph(model: nn.Module, maps: torch.Tensor, case: str) -> None:
    feature, expected, layout = CASES[case]
    extractor = extractor_of(model, {"layer3": feature, "layer4": "C5"})
    found = extractor(X)
    assert list(found) == ["key", "C5"]
    assert torch.equal(found["key"], expected(maps))
    assert found["key"].requires_grad is not feature.detach
    info = extractor.feature_info["key"]
    assert info.layout == layout
    assert info.shape == tuple(expected(maps).shape)
    assert info.dtype == expected(maps).dtype
    for each in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor)), extractor.train().eval()):
        assert torch.equal(each(X)["key"], found["key"])
    other = torch.rand(3, 3, 64, 40)
    assert extractor(other)["key"].shape[0] == 3


@pytest.mark.slow
def test_a_module_becomes_a_part_of_the_extractor(model: nn.Module, maps: torch.Tensor) -> None:
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 5))
    extractor = extractor_of(model, {"layer3": Feature("my head", pool="avg", apply=head)}).eval()
    assert torch.equal(extractor(X)["my head"], head[1](maps.mean((2, 3))))
    assert extractor.feature_heads.my_head is head
    assert "feature_heads.my_head.1.weight" in extractor.state_dict()
    extractor(X)["my head"].sum().backward()
    assert head[1].weight.grad is not None
    assert not hasattr(model, "feature_heads")
    copied = copy.deepcopy(extractor)
    assert copied.feature_heads.my_head is not head


def test_the_head_draws_after_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)).train()
    x = torch.rand(3, 4)
    torch.manual_seed(0)
    expected = model(x)
    extractor = extractor_of(model, {"0": Feature("noise", apply=nn.Dropout(0.5)), "3": "last"}, example_inputs=x)
    torch.manual_seed(0)
    assert torch.equal(extractor(x)["last"], expected)


def test_patterns_and_lists_take_them(model: nn.Module) -> None:
    found = extractor_of(model, {"layer[34]": Feature("C*", pool="avg"), "layer1": Feature(pool="max")})(X)
    assert {key: tuple(value.shape) for key, value in found.items()} == {
        "C3": (2, 256),
        "C4": (2, 512),
        "layer1": (2, 64),
    }


def test_a_value_that_is_overwritten_later_is_pooled_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True)).eval()
    found = extractor_of(model, {"0": Feature("conv", pool="avg"), "1": Feature("flat", flatten=True)})(X)
    conv = nn.functional.conv2d(X, model[0].weight, model[0].bias)
    assert torch.equal(found["conv"], conv.mean((2, 3)))
    assert torch.equal(found["flat"], conv.relu().flatten(1))


@pytest.mark.sweep
def test_tokens_of_a_vision_transformer() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2).eval()
    x = torch.rand(2, 3, 32, 32)
    tokens = model.forward_features(x)
    nodes = {"norm": Feature("mean", pool="avg"), "blocks.1": Feature("last", pool="cls"), "output": "logits"}
    found = extractor_of(model, nodes, example_inputs=x)(x)
    assert torch.equal(found["mean"], tokens[:, 1:].mean(1))
    assert torch.equal(model.norm(found["last"]), tokens[:, 0])


TOKENS: dict[str, tuple[Feature, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "maps": (Feature("a", layout="NCHW"), lambda x: x[:, 2:].mT.reshape(-1, 24, 4, 6), "NCHW"),
    "maps, channels last": (Feature("a", layout="NHWC"), lambda x: x[:, 2:].reshape(-1, 4, 6, 24), "NHWC"),
    "without prefix": (Feature("a", prefix_tokens="drop"), lambda x: x[:, 2:], "NLC"),
    "channels first": (Feature("a", layout="NCL"), lambda x: x.mT, "NCL"),
    "of patches, channels first": (
        Feature("a", layout="NCL", prefix_tokens="drop"), lambda x: x[:, 2:].mT, "NCL"
    ),
}  # fmt: skip


class Tokens(nn.Module):
    """Patches of 8 x 8 pixels after two tokens of another kind; any size of image."""

    num_prefix_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 8, 8)
        self.prefix = nn.Parameter(torch.rand(1, 2, 24))
        self.block = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.prefix.expand(len(x), -1, -1), patches], 1))


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_patches(name: str) -> None:
    feature, expected, layout = TOKENS[name]
    model = Tokens()
    extractor = extractor_of(model, {"block": feature})
    assert torch.equal(extractor(X)["a"], expected(model(X)))
    info = extractor.feature_info["a"]
    assert (info.layout, info.shape, info.channels) == (layout, tuple(expected(model(X)).shape), 24)


def test_maps_of_tokens_follow_the_size_of_the_image() -> None:
    model = Tokens()
    extractor = extractor_of(model, {"block": Feature("a", layout="NCHW")})
    x = torch.rand(1, 3, 72, 16)
    assert torch.equal(extractor(x)["a"], model(x)[:, 2:].mT.reshape(1, 24, 9, 2))


def test_prefix_tokens_are_put_apart() -> None:
    model = Tokens()
    extractor = extractor_of(model, {"block": Feature("a", layout="NCHW", prefix_tokens="apart")})
    found = extractor(X)
    assert list(found) == ["a", "a_prefix"] == [info.key for info in extractor.feature_info]
    assert torch.equal(found["a_prefix"], model(X)[:, :2])
    assert extractor.feature_info["a_prefix"].shape == (2, 2, 24)


def test_one_value_under_several_keys(model: nn.Module, maps: torch.Tensor) -> None:
    head = nn.Linear(256, 5)
    nodes = {
        "layer3": ["maps", Feature("pooled", pool="avg"), Feature("scores", pool="max", apply=head)],
        "layer[12]": ["map*", Feature("mean*", pool="avg")],
    }
    extractor = extractor_of(model, nodes)
    found = extractor(X)
    assert list(found) == ["maps", "pooled", "scores", "map1", "mean1", "map2", "mean2"]
    assert torch.equal(found["maps"], maps)
    assert torch.equal(found["pooled"], maps.mean((2, 3)))
    assert torch.equal(found["scores"], head(maps.amax((2, 3))))
    assert torch.equal(found["mean2"], found["map2"].mean((2, 3)))
    infos = extractor.feature_info
    assert infos.keys() == list(found)
    assert [info.shape for info in infos] == [tuple(value.shape) for value in found.values()]
    assert [info.node for info in infos][:3] == ["layer3"] * 3


def test_a_function_that_reads_values_leaves_the_shape_open(model: nn.Module) -> None:
    seen: list[float] = []

    def strongest(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.max().item())
        return x[x > 0]

    extractor = extractor_of(model, {"layer3": Feature("a", apply=strongest)})
    assert not seen
    assert extractor.feature_info["a"].shape is None
    assert extractor(X)["a"].dim() == 1


def test_a_function_may_return_several_tensors(model: nn.Module) -> None:
    extractor = extractor_of(model, {"layer3": Feature("a", pool="avg", apply=lambda x: {"all": x, "one": (x[0],)})})
    assert extractor.feature_info["a"].shapes == {"['all']": (2, 256), "['one'][0]": (256,)}


def test_a_module_runs_for_its_shape_without_being_touched(model: nn.Module) -> None:
    head = nn.BatchNorm1d(256)  # in train mode it counts
    extractor = extractor_of(model, {"layer3": Feature("a", pool="avg", apply=head)})
    assert extractor.feature_info["a"].shape == (2, 256)
    assert int(head.num_batches_tracked) == 0


def test_maps_become_sequences(model: nn.Module, maps: torch.Tensor) -> None:
    found = extractor_of(model, {"layer3": Feature("a", layout="NLC")})(X)
    assert torch.equal(found["a"], maps.flatten(2).mT)


def test_tokens_of_a_list_of_images_are_no_map() -> None:
    class OfList(Tokens):
        def forward(self, images: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(torch.stack(images))

    with pytest.raises(featx.RequestError, match="not known to be patches of an image"):
        extractor_of(OfList(), {"block": Feature("a", layout="NCHW")}, example_inputs=([X[0], X[1]],))


@pytest.mark.slow
def test_tokens_of_a_stride_that_the_trace_cannot_tell() -> None:
    images = torch.rand(2, 3, 34, 51)

    class Scaled(Tokens):  # of 34 x 51 pixels it sees 32 x 48
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images[:, :, :32, :48])

    model = Scaled()
    tokens = extractor_of(model, ["block"], example_inputs=images)(images)["block"]
    nodes = {"block": Feature("map", layout="NCHW", of_stride=8)}
    found = extractor_of(model, nodes, example_inputs=images)(images)["map"]
    assert torch.equal(found, tokens[:, 2:].mT.unflatten(2, (4, 6)))
    with pytest.raises(featx.RequestError, match="not as many as the 425 patches"):
        extractor_of(model, {"block": Feature("map", layout="NCHW", of_stride=2)}, example_inputs=images)
    with pytest.raises(featx.ArgumentTypeError, match="of_stride must be a positive number, got 0"):
        Feature(of_stride=0)


def test_a_key_of_prefix_tokens_that_is_taken_is_refused() -> None:
    nodes = {"block": Feature("a", prefix_tokens="apart"), "patch": "a_prefix"}
    with pytest.raises(featx.RequestError, match="the key 'a_prefix' is given twice"):
        extractor_of(Tokens(), nodes)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "pool": (lambda: Feature("a", pool="sum"), featx.ArgumentTypeError, "pool must be one of avg, max, gem, cls"),  # type: ignore[arg-type]
    "dtype": (lambda: Feature("a", dtype="half"), featx.ArgumentTypeError, "dtype must be a torch.dtype"),  # type: ignore[arg-type]
    "layout": (lambda: Feature("a", layout="CHW"), featx.ArgumentTypeError, "layout must be one of NCHW, NHWC"),
    "mask": (lambda: Feature(mask=5), featx.ArgumentTypeError, "mask must be the name of an input, or None, got 5"),  # type: ignore[arg-type]
    "prefix": (lambda: Feature("a", prefix_tokens="x"), featx.ArgumentTypeError, "prefix_tokens must be one of keep"),  # type: ignore[arg-type]
    "a class": (lambda: Feature("a", apply=nn.ReLU), featx.ArgumentTypeError, "apply must be a function or a module"),
    "apply": (lambda: Feature("a", apply=3), featx.ArgumentTypeError, "apply must be a function"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature("a", pool="cls"), "is NCHW and has no class token"),
        (Feature("a", layout="NCDHW"), "is NCHW and cannot be permuted to NCDHW"),
    ],
)
def test_what_cannot_be_done_is_refused(model: nn.Module, feature: Feature, message: str) -> None:
    with pytest.raises(featx.RequestError, match=message):
        extractor_of(model, {"layer3": feature})


def test_a_layout_that_is_not_known_is_asked_for() -> None:
    options: Any = {"tracer": "symbolic", "example_inputs": None}
    conv = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(featx.RequestError, match=r"its shape is not known.*give example_inputs"):
        extractor_of(conv, {"0": Feature(pool="avg")}, **options)
    found = extractor_of(conv, {"0": Feature(pool="avg", of_layout="NCHW")}, **options)(X)
    assert torch.equal(found["0"], conv(X).mean((2, 3)))


def test_a_layout_of_another_rank_is_refused_where_shapes_are_not_known() -> None:
    options: Any = {"tracer": "symbolic", "example_inputs": None}
    linear, tokens = nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 17, 4)
    for layout in ("NCHW", "NHWC"):
        extractor = extractor_of(linear, {"0": Feature(pool="avg", of_layout=layout)}, **options)
        with pytest.raises(featx.RequestError, match=rf"of_layout='{layout}' has 4 dimensions, .* shape \(2, 17, 4\)"):
            extractor(tokens)
    with pytest.raises(featx.RequestError, match=r"not known which tokens stand for no patch.*give example_inputs"):
        extractor_of(linear, {"0": Feature(pool="avg", of_layout="NLC")}, **options)


def test_such_an_extractor_is_scripted_and_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"tracer": "symbolic", "example_inputs": None}
    linear, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.rand(2, 5, 6, 4)
    extractor = extractor_of(linear, {"0": Feature("mean", pool="avg", of_layout="NHWC")}, **options)
    extractor.to_folder(tmp_path / "alone_by_layout", "Alone", pickled=False)
    monkeypatch.syspath_prepend(tmp_path)
    alone = importlib.import_module("alone_by_layout").Alone().eval()
    for module in (torch.jit.script(extractor), alone):
        assert torch.equal(module(x)["mean"], linear(x).mean((1, 2)))
        with pytest.raises(Exception, match=r"NHWC.*shape"):
            module(x[0])


def test_a_module_and_adaptive_do_not_go_together(model: nn.Module) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="cannot apply a module"):
        extractor_of(model, {"layer3": Feature("a", apply=nn.Flatten())}, adaptive=True)


def test_a_head_that_does_not_fit_is_refused_when_the_extractor_is_made() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    with pytest.raises(featx.RequestError, match=r"apply of '1' fails on a value of shape \(2, 4\)"):
        featx.create_feature_extractor(
            model, {"1": featx.Feature(pool="avg", apply=nn.Linear(3, 3))}, example_inputs=torch.rand(2, 3, 8, 8)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "apply", [lambda x: x.mul_(2), nn.Hardswish(inplace=True), nn.Sequential(nn.ReLU(inplace=True))]
)
def test_what_writes_in_place_changes_no_other_feature(apply: Any) -> None:
    model, x = torchvision.models.resnet18(weights=None).eval(), torch.randn(1, 3, 64, 64)
    seen: dict[str, torch.Tensor] = {}
    for name in ("layer2", "layer3"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.clone()})
        )
    extractor = featx.create_feature_extractor(
        model, {"layer2": ["raw", Feature("applied", apply=copy.deepcopy(apply))], "layer3": "next", "output": "out"}
    )
    with torch.no_grad():
        found, expected = extractor(x), model(x)
        assert torch.equal(found["applied"], apply(seen["layer2"].clone()))
    assert torch.equal(found["raw"], seen["layer2"])
    assert torch.equal(found["next"], seen["layer3"])
    assert torch.equal(found["out"], expected)


def test_options_have_names_and_types() -> None:
    with pytest.raises(TypeError):
        Feature("C5", "avg")
    with pytest.raises(featx.FeatxError, match="detach and flatten are True or False"):
        Feature("C5", detach="avg")


@pytest.mark.parametrize(
    ("feature", "option"),
    [
        (Feature(pool="avg", of_layout="NLC"), "pool"), (Feature(flatten=True), "flatten"),
        (Feature(detach=True), "detach"), (Feature(dtype=torch.float16), "dtype"),
    ],
)  # fmt: skip
def test_what_is_for_one_tensor_is_refused_for_a_tuple_that_says_what_it_holds(feature: Feature, option: str) -> None:
    model, x = nn.Sequential(nn.LSTM(4, 5, batch_first=True)), torch.rand(2, 3, 4)
    with pytest.raises(
        featx.RequestError,
        match=rf"{option} .*'0' is for a value .* 3 tensors: \[0\], \[1\]\[0\], \[1\]\[1\]",
    ):
        featx.create_feature_extractor(model, {"0": feature}, example_inputs=x)
    last = Feature(apply=lambda value: value[1][0], dtype=torch.float64)
    found = featx.create_feature_extractor(model, {"0": last}, example_inputs=x)(x)["0"]
    assert torch.equal(found, model(x)[1][0].double())


def test_layout_of_another_rank_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5)), torch.rand(2, 3, 4)
    with pytest.raises(featx.RequestError, match=r"of_layout='NCHW' has 4 dimensions.*\(2, 3, 5\)"):
        featx.create_feature_extractor(model, {"0": Feature(pool="avg", of_layout="NCHW")}, example_inputs=x)


class ReturnsADict(nn.Module):
    """Returns its map in an OrderedDict, as torchvision's segmentation models do, beside a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.size = Size()

    def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
        x = self.conv(x) * self.size(x)
        return OrderedDict(out=x.relu())


class Size(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return x.size(1)


def test_pooling_a_dict_with_a_map_is_refused_with_what_does_it() -> None:
    model, x = ReturnsADict().eval(), torch.rand(2, 3, 8, 8)
    assert dict(featx.create_feature_extractor(model, ["output"], example_inputs=x).feature_info[0].shapes) == {
        "['out']": (2, 4, 8, 8)
    }
    with pytest.raises(featx.RequestError, match=re.escape("['out'] is 'relu'")) as raised:
        featx.create_feature_extractor(model, {"output": Feature(pool="avg")}, example_inputs=x)
    advice = re.search(r"apply=(lambda value: .*\)) for a map", str(raised.value))
    assert advice is not None
    apply = eval(advice[1])
    found = featx.create_feature_extractor(model, {"output": Feature(apply=apply)}, example_inputs=x)(x)
    assert torch.equal(found["output"], model(x)["out"].mean((2, 3)))


def test_pooling_what_is_no_tensor_is_refused_without_asking_for_an_example() -> None:
    with pytest.raises(featx.RequestError, match=r"this one is not known to hold any\. Ask for a node") as raised:
        featx.create_feature_extractor(
            ReturnsADict().eval(), {"size": Feature(pool="avg")}, example_inputs=torch.rand(2, 3, 8, 8)
        )
    assert "example_inputs" not in str(raised.value)
