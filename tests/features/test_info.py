"""feature_info: shapes, channels, strides and layouts of what an extractor returns."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx
from featx import Graph
from featx.features.describing.shapes import forms_of


def info_of(model: nn.Module, nodes: Any, **options: Any) -> Any:
    return featx.create_feature_extractor(model, nodes, suppress_diff_warning=True, **options).feature_info


@pytest.fixture(scope="module")
def resnet() -> featx.DualGraphModule:
    model = torchvision.models.resnet18(weights=None).eval()
    nodes = {"layer*": "C*", "layer4.1.add": "sum", "avgpool": "pool", "output": "logits"}
    return featx.create_feature_extractor(model, nodes, example_inputs=torch.rand(2, 3, 64, 96))


@pytest.mark.slow
def test_it_says_what_comes_out(resnet: featx.DualGraphModule) -> None:
    infos = resnet.feature_info
    found = resnet(torch.rand(2, 3, 64, 96))
    assert [info.key for info in infos] == list(found)
    assert [info.shape for info in infos] == [tuple(value.shape) for value in found.values()]
    assert [info.dtype for info in infos] == [value.dtype for value in found.values()]
    assert [info.node for info in infos] == [
        "layer1", "layer2", "layer3", "layer4", "layer4.1.add", "avgpool", "output"
    ]  # fmt: skip
    assert [info.module for info in infos] == [*["Sequential"] * 4, None, "AdaptiveAvgPool2d", None]
    assert [info.layout for info in infos] == [*["NCHW"] * 6, "NC"]
    assert resnet.channels == infos.channels() == [64, 128, 256, 512, 512, 512, 1000]
    assert resnet.strides == infos.reduction() == [4, 8, 16, 32, 32, (64, 96), None]


@pytest.mark.parametrize("side", [33, 65, 75, 97, 100, 225, 230])
def test_strides_of_an_image_whose_sides_are_no_multiples(side: int) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    infos = info_of(model, ["layer1", "layer2", "layer3", "layer4"], example_inputs=torch.rand(1, 3, side, side))
    assert infos.reduction() == [4, 8, 16, 32]


@pytest.mark.parametrize(("patch", "side"), [(14, 70), (14, 84), (7, 49), (12, 60), (16, 80)])
def test_stride_of_patches_is_the_side_of_a_patch(patch: int, side: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, patch, patch), nn.ReLU())
    assert info_of(model, ["0", "1"], example_inputs=torch.rand(1, 3, side, side)).reduction() == [patch, patch]


def test_it_has_timms_accessors(resnet: featx.DualGraphModule) -> None:
    infos = resnet.feature_info
    assert infos.keys() == ["C1", "C2", "C3", "C4", "sum", "pool", "logits"]
    assert infos.channels(1) == 128
    assert infos.channels([1, 2]) == [128, 256]
    assert infos.reduction(2) == 16
    assert infos.module_name([0, 4]) == ["layer1", "layer4.1.add"]
    assert infos.get_dicts()[3]["num_chs"] == 512
    assert infos["C4"].stride == infos[3].stride == 32
    assert len(infos) == 7


def test_repr_begins_with_it(resnet: featx.DualGraphModule) -> None:
    lines = repr(resnet).splitlines()
    assert lines[0].split() == ["key", "node", "module", "shape", "layout", "channels", "stride"]
    assert lines[2].split() == ["C2", "layer2", "Sequential", "2x128x8x12", "NCHW", "128", "8"]


def test_copies_have_it(resnet: featx.DualGraphModule) -> None:
    for each in (copy.deepcopy(resnet), copy.copy(resnet), pickle.loads(pickle.dumps(resnet))):
        assert list(each.feature_info) == list(resnet.feature_info)
        assert each.channels == resnet.channels


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    ["resnet18", "convnext_atto", "inception_v3", "efficientnet_b0", "regnetx_002", "mobilenetv3_small_050", "vgg11",
     "densenet121", "darknet17"],
)  # fmt: skip
def test_channels_and_strides_are_those_that_timm_declares(name: str) -> None:
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(name, pretrained=False, features_only=True).feature_info
    model = timm.create_model(name, pretrained=False).eval()
    names = [each["module"] for each in model.feature_info]
    ours = info_of(model, names)
    assert ours.channels() == [each["num_chs"] for each in model.feature_info]
    assert [ours[names.index(each)].stride for each in names] == [each["reduction"] for each in model.feature_info]
    assert set(theirs.channels()) <= set(ours.channels())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "node", "layout", "channels", "stride", "prefix"),
    [
        ("vit_tiny_patch16_224", "blocks.0", "NLC", 192, 16, 1),
        ("vit_small_patch14_dinov2", "blocks.0", "NLC", 384, 14, 1),
        ("vit_small_patch14_reg4_dinov2", "blocks.0", "NLC", 384, 14, 5),
        ("swin_tiny_patch4_window7_224", "layers.2", "NHWC", 384, 16, 0),
        ("mixer_s32_224", "blocks.0", "NLC", 512, 32, 0),
    ],
)
def test_layouts_of_transformers(name: str, node: str, layout: str, channels: int, stride: int, prefix: int) -> None:
    timm = pytest.importorskip("timm")
    [info] = info_of(timm.create_model(name, pretrained=False).eval(), [node])
    assert (info.layout, info.channels, info.stride, info.prefix_tokens) == (layout, channels, stride, prefix)


def test_tokens_that_are_as_many_as_patches_by_chance_are_all_pooled() -> None:
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.last = nn.Parameter(torch.rand(1, 32, 4)), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.tokens * x.mean((1, 2, 3))[:, None, None])

    model, x = Queries().eval(), torch.rand(2, 3, 64, 64)  # 16 patches of 16 pixels, and 16 tokens more
    nodes = {"last": featx.Feature("pooled", pool="avg")}
    found = featx.create_feature_extractor(model, nodes, example_inputs=x)(x)["pooled"]
    assert torch.equal(found, model(x).mean(1))


def test_videos_signals_and_texts() -> None:
    video = nn.Sequential(nn.Conv3d(3, 8, 3, stride=(1, 2, 2), padding=1), nn.ReLU())
    [info] = info_of(video, ["0"], example_inputs=torch.rand(1, 3, 8, 32, 32))
    assert (info.layout, info.channels, info.stride) == ("NCDHW", 8, (1, 2, 2))
    signal = nn.Sequential(nn.Conv1d(1, 8, 5, stride=4, padding=2), nn.ReLU())
    conv, relu = info_of(signal, ["0", "1"], example_inputs=torch.rand(1, 1, 400))
    assert (conv.layout, conv.channels, conv.stride) == ("NCL", 8, 4)
    assert (relu.layout, relu.channels, relu.stride) == ("NCL", 8, 4)
    text = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    [info] = info_of(text, ["1"], example_inputs=torch.randint(10, (2, 7)))
    assert (info.layout, info.channels, info.stride) == ("NLC", 4, None)


class TextConvolutions(nn.Module):
    """A text as channels of a signal, as in TextCNN, of which any two sizes may be equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.conv = nn.Conv1d(6, width, 3, padding=1)
        self.pool = nn.MaxPool1d(2)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.pool(self.conv(x.transpose(1, 2)).relu())
        return self.norm(x.transpose(1, 2))


@pytest.mark.parametrize("width", [2, 5, 8, 16])
def test_dimensions_of_texts_are_told_by_what_changes_with_the_length(width: int) -> None:
    names = ["embed", "conv", "relu", "pool", "norm"]
    infos = info_of(TextConvolutions(width), names, example_inputs=torch.randint(10, (2, 8)))
    assert [info.layout for info in infos] == ["NLC", "NCL", "NCL", "NCL", "NLC"]
    assert [info.channels for info in infos] == [6, width, width, width, width]


class SamplesSecond(nn.Module):
    """Layers of torch take the samples as the second dimension by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(x).transpose(0, 1)).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 4, 7])
def test_samples_may_be_the_second_dimension(length: int) -> None:
    model, x = SamplesSecond().eval(), torch.rand(3, length, 6)
    [info] = info_of(model, ["layer"], example_inputs=x)
    assert (info.layout, info.channels) == ("LNC", 4)
    pooled = featx.create_feature_extractor(model, {"layer": featx.Feature("a", pool="avg")}, example_inputs=x)
    assert torch.allclose(pooled(x)["a"], model(x))


class OneLength(nn.Module):
    """Takes one length alone, as the encoder of Whisper."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(6, 8, 3, padding=1)
        self.positions = nn.Parameter(torch.rand(20, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == len(self.positions)
        return self.layer(self.embed(x).mT + self.positions)


@pytest.mark.slow
def test_a_layout_that_no_other_size_tells_is_told_by_the_layers_of_the_module() -> None:
    infos = info_of(OneLength().eval(), ["embed", "layer"], example_inputs=torch.rand(2, 6, 20))
    assert [(info.layout, info.channels) for info in infos] == [("NCL", 8), ("NLC", 8)]


class ImageWithSamplesSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 8, stride=8)
        self.layer = nn.TransformerEncoderLayer(16, 2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.stem(x).flatten(2).permute(2, 0, 1))


def test_samples_of_images_may_be_the_second_dimension() -> None:
    infos = info_of(ImageWithSamplesSecond(), ["flatten", "layer"], example_inputs=torch.rand(2, 3, 32, 32))
    assert [info.layout for info in infos] == ["NCL", "LNC"]


def test_what_is_no_tensor_and_what_was_traced_on_symbols_has_no_shape() -> None:
    lstm = nn.Sequential(nn.LSTM(4, 5))
    [info] = info_of(lstm, ["0"], example_inputs=torch.rand(3, 2, 4))
    assert (info.shape, info.layout, info.channels) == (None, None, None)
    [info] = info_of(nn.Sequential(nn.Linear(2, 3)), ["0"], tracer="symbolic")
    assert (info.module, info.shape) == ("Linear", None)


SHAPES = [
    (2,),
    (2, 3),
    (2, 3, 4),
    (2, 3, 4, 5),
    (2, 3, 4, 5, 6),
    (1, 2, 3, 4, 5, 6),
    (0, 3, 4, 4),
    (2, 3, 0, 4),
    (2, 0, 4),
]


@pytest.mark.parametrize("given", SHAPES[1:6] + SHAPES[7:], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_beside_any_input_has_an_answer(given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    class Gives(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(shape) + 1

    [info] = info_of(nn.Sequential(Gives()), ["0.add"], example_inputs=torch.rand(given))
    assert info.shape == shape
    assert info.layout is None or info.channels == shape[info.layout.index("C")]


def test_a_jagged_tensor_has_no_shape() -> None:
    class Jagged(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)

    [info] = info_of(nn.Sequential(Jagged()), ["0"], example_inputs=torch.rand(2, 3, 4))
    assert info.shape is None


def test_each_mode_has_its_own() -> None:
    class ByMode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x if self.training else x[..., ::2, ::2])

    extractor = featx.create_feature_extractor(
        ByMode().eval(), ["conv"], example_inputs=torch.rand(1, 3, 8, 8), suppress_diff_warning=True
    )
    assert extractor.strides == [2]
    assert extractor.train().strides == [1]
    assert extractor.eval().strides == [2]


def test_a_module_of_that_name_is_the_models() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.channels, self.strides = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.strides(self.channels(x))

    model, x = Names().eval(), torch.rand(1, 3, 8, 8)
    extractor = featx.create_feature_extractor(model, ["strides"], example_inputs=x)
    assert torch.equal(extractor(x)["strides"], model(x))
    assert extractor.channels is model.channels
    assert extractor.feature_info.channels() == [4]


class Square(nn.Module):
    """Gives 16x16x16 for an image of 32 x 32, with channels first or last."""

    def __init__(self, *, channels_last: bool, is_fixed: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 2, 2)
        self.body = nn.Sequential(Permuted() if channels_last else nn.Identity(), Twice())
        self.is_fixed = is_fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_fixed:
            assert x.shape[-1] == 32
        return self.body(self.conv(x))


class Permuted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_shape_that_fits_two_layouts_is_settled_by_a_wider_image(channels_last: bool) -> None:
    model = Square(channels_last=channels_last)
    infos = info_of(model, ["body", "conv"], example_inputs=torch.rand(2, 3, 32, 32))
    assert [info.shape for info in infos] == [(2, 16, 16, 16)] * 2
    assert [info.layout for info in infos] == ["NHWC" if channels_last else "NCHW", "NCHW"]


def test_a_stride_for_each_axis_is_told_from_other_channels() -> None:
    class Wide(nn.Module):
        """Gives 8 channels of 8 x 4 places, which are 4 channels of 8 x 8 places by their sizes."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 2, (2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.first(x))

    infos = info_of(Wide(), ["output", "first"], example_inputs=torch.rand(2, 3, 16, 16))
    assert [(info.layout, info.channels, info.stride) for info in infos] == [("NCHW", 8, (2, 4))] * 2


def test_a_shape_that_fits_two_layouts_is_not_guessed() -> None:
    model = Square(channels_last=True, is_fixed=True)
    (info,) = info_of(model, ["body"], example_inputs=torch.rand(2, 3, 32, 32))
    assert (info.layout, info.channels, info.stride) == (None, None, None)
    model.output_fmt = "NHWC"  # what models of timm declare
    (info,) = info_of(model, ["body"], example_inputs=torch.rand(2, 3, 32, 32))
    assert (info.layout, info.stride) == ("NHWC", 2)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = nn.functional.pad(nn.functional.unfold(x, 4, stride=4).mT, (0, 0, 1, 0))
        return (tokens @ tokens.mT)[:, None].softmax(-1)


def test_tokens_on_both_sides_of_an_attention_are_no_map() -> None:
    (info,) = info_of(Attention(), ["softmax"], example_inputs=torch.rand(2, 3, 64, 64))
    assert info.shape == (2, 1, 257, 257)
    assert info.stride is None


def test_windows_in_the_batch_have_no_stride() -> None:
    class Windows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(2, (2, 16)).unflatten(4, (2, 16)).permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, 16, 16).relu()

    (info,) = info_of(Windows(), ["relu"], example_inputs=torch.rand(2, 3, 32, 32))
    assert info.shape == (8, 3, 16, 16)
    assert info.stride is None


class OfSeveral(nn.Module):
    """Returns a dict; a layer inside returns a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 6, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        out, (hidden, _) = self.rnn(self.embed(x))
        return {"all": out, "last": (hidden[-1], 3)}


def test_shapes_inside_of_what_is_no_tensor() -> None:
    model, x = OfSeveral().eval(), torch.rand(2, 5, 8)
    infos = info_of(model, ["embed", "rnn", "output"], example_inputs=x)
    out, (hidden, cell) = model.rnn(model.embed(x))
    assert infos["embed"].shapes == {}
    assert infos["embed"].stride is None  # a signal or a text: which dimension has the places is not known
    assert infos["rnn"].shape is None
    expected = {"[0]": out, "[1][0]": hidden, "[1][1]": cell}
    assert infos["rnn"].shapes == {path: tuple(tensor.shape) for path, tensor in expected.items()}
    assert infos["output"].shapes == {"['all']": (2, 5, 6), "['last'][0]": (2, 6)}
    assert "[0] 2x5x6, [1][0] 2x2x6, [1][1] 2x2x6" in repr(infos)


@pytest.mark.slow
def test_shapes_of_the_parts_that_a_model_takes_out() -> None:
    model, x = OfSeveral().eval(), torch.rand(2, 5, 8)
    table = featx.nodes(model, x)
    assert table["rnn"].shapes["[0]"] == (2, 5, 6)
    names = featx.get_graph_node_names(model, example_inputs=x)[1]
    found = featx.create_feature_extractor(model, names, example_inputs=x, suppress_diff_warning=True)
    for key, value in found(x).items():
        if isinstance(value, torch.Tensor):
            assert found.feature_info[key].shape == tuple(value.shape), key


class Conditioned(nn.Module):
    """Takes an image and a number as a tensor, and has as many channels as places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(1, 16)

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return self.conv(image) + self.time(step.reshape(1, 1).float())[:, :, None, None]


@pytest.mark.parametrize("step", [torch.tensor(5), torch.tensor(0.5), torch.tensor([5])])
def test_tensors_without_dimensions_stand_beside_images(step: torch.Tensor) -> None:
    example = {"image": torch.rand(2, 3, 16, 16), "step": step}
    assert featx.create_feature_extractor(Conditioned(), ["conv"], example_inputs=example).strides == [1]


@pytest.mark.parametrize(
    ("path", "taken", "expected"),
    [
        (".hidden", "hid", {}),
        (".hid", "hid", {"": ((2, 3), torch.float32)}),
        (".hid.state", "hid", {".state": ((2, 3), torch.float32)}),
        (".hid[0]", "hid", {"[0]": ((2, 3), torch.float32)}),
    ],
)
def test_forms_of_an_attribute_are_not_those_of_one_whose_name_starts_like_it(
    path: str, taken: str, expected: Any
) -> None:
    graph = Graph()
    owner = graph.placeholder("owner")
    owner.meta["parts"] = {path: (torch.Size([2, 3]), torch.float32)}
    assert forms_of(graph.call_function(getattr, (owner, taken))) == expected


class MixesPatches(nn.Module):
    """Takes images of one size alone, since a layer works on the patches of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 12, 4, stride=4), nn.Sequential(nn.Linear(16, 16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.mix(self.stem(images).flatten(2)).transpose(1, 2)


def test_what_mixes_patches_has_its_channels_first() -> None:
    torch.manual_seed(0)
    model, images = MixesPatches().eval(), torch.rand(2, 3, 16, 16)
    request = {"mix": featx.Feature("x", pool="avg")}
    found = featx.create_feature_extractor(model, request, example_inputs=images)(images)["x"]
    assert torch.equal(found, model.mix(model.stem(images).flatten(2)).mean(2))


class Resizing(nn.Module):
    """Scales its images to one size in eval mode and to another one in train mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.BatchNorm2d(5), nn.ReLU())
        self.tokens = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(x, size=(7, 30) if self.training else (16, 16))
        x = self.body(x).sigmoid()
        return self.tokens(x.permute(0, 2, 3, 1))


# With 8 x 8 places and 5 channels, of 32 x 48 pixels, the map has the form of one of 5 x 8 places, too.
@pytest.mark.parametrize("sides", [(32, 48), (30, 50)])
def test_maps_of_a_model_that_resizes_images_have_their_layout_by_the_layers_that_make_them(
    sides: tuple[int, int],
) -> None:
    model, x = Resizing().eval(), torch.rand(2, 3, *sides)
    found = info_of(model, ["body", "body.2", "sigmoid", "permute", "tokens"], example_inputs=x)
    assert found.reduction() == [None] * 5
    assert [(info.layout, info.channels) for info in found] == [("NCHW", 5)] * 3 + [(None, None)] * 2
    pooled = featx.create_feature_extractor(
        model, {name: featx.Feature(pool="avg") for name in ("body", "sigmoid")}, example_inputs=x
    )
    expected = model.body(nn.functional.interpolate(x, size=(16, 16)))
    assert torch.equal(pooled(x)["body"], expected.mean((2, 3)))
    assert torch.equal(pooled(x)["sigmoid"], expected.sigmoid().mean((2, 3)))
    assert pooled.train()(x)["body"].shape == (2, 5)


def test_layers_tell_no_layout_where_as_many_places_as_channels_lie_last() -> None:
    x = torch.rand(2, 3, 32, 48)
    model = Resizing().eval()
    model.body[0], model.body[1] = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
    model.tokens = nn.Linear(8, 6)
    assert [info.layout for info in info_of(model, ["body", "permute"], example_inputs=x)] == [None, None]
