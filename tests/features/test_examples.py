"""find_example: inputs are found for a model of which nothing else is known, and it runs with them."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx
from featx.examples import Example, as_example, find_example

Watch = Callable[[nn.Module], Callable[[], None]]


def found(model: nn.Module, training: bool = False) -> Example:
    """Return the example of `model`, which runs with it."""
    example = find_example(model, training)
    assert example is not None
    with torch.no_grad():
        model.train(training)(*example.args, **example.kwargs)
    return example


def shape_of(model: nn.Module) -> tuple[int, ...]:
    return tuple(found(model).args[0].shape)


def test_tensor_becomes_one_positional_input() -> None:
    x = torch.rand(2)
    assert as_example(x) == Example((x,), {}, "example_inputs")


@pytest.mark.parametrize("kind", [tuple, list])
def test_sequence_becomes_positional_inputs(kind: type) -> None:
    assert as_example(kind([1, "a"])) == Example((1, "a"), {}, "example_inputs")


def test_dict_becomes_keyword_inputs_and_is_copied() -> None:
    given = {"x": 1}
    example = as_example(given)
    assert example == Example((), {"x": 1}, "example_inputs")
    assert example.kwargs is not given


@pytest.mark.parametrize("given", [None, 3, "image.jpg", {1: 2}])
def test_other_inputs_are_refused_with_what_to_pass(given: object) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"pass example_inputs=torch\.rand"):
        as_example(given)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv1d(5, 2, 3), (2, 5, 64)),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(4, 2, 3)), (2, 4, 224, 224)),
        (nn.Conv3d(1, 2, 3), (2, 1, 16, 112, 112)),
        (nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2)), (2, 7)),
        (nn.BatchNorm1d(6), (2, 6)),
        (nn.BatchNorm2d(6), (2, 6, 32, 32)),
        (nn.BatchNorm3d(6), (2, 6, 8, 16, 16)),
        (nn.LayerNorm([4, 3]), (2, 4, 3)),
        (nn.LSTM(5, 2), (5, 2, 5)),
        (nn.GRU(6, 2, batch_first=True), (2, 5, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("training", [False, True])
def test_first_layer_with_known_channels_says_what_goes_in(
    model: nn.Module, shape: tuple[int, ...], training: bool
) -> None:
    example = found(model, training)
    assert example.args[0].shape == shape
    assert example.kwargs == {}


def test_source_names_the_layer() -> None:
    assert found(nn.Sequential(nn.Conv2d(3, 1, 1), nn.Linear(224, 1))).source == "the first Conv2d"


def test_tokens_stay_below_the_size_of_the_embedding() -> None:
    tokens = found(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))).args[0]
    assert tokens.shape == (2, 16)
    assert tokens.dtype == torch.int64
    assert set(tokens.flatten().tolist()) == {0, 1, 2}


def test_values_have_the_type_of_the_parameters() -> None:
    assert found(nn.Linear(3, 2, dtype=torch.float64)).args[0].dtype == torch.float64


def test_values_are_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        example = find_example(nn.Linear(3, 2))
    assert example is not None
    assert example.args[0].device.type == "cpu"


def test_values_are_the_same_each_time() -> None:
    model = nn.Linear(3, 2)
    assert torch.equal(found(model).args[0], found(model).args[0])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + y


class OneInput(TwoInputs):
    def forward(self, x: Tensor, y: float = 1.0, *rest: Tensor, **options: Tensor) -> Tensor:  # pyright: ignore
        return self.linear(x) + y


def test_nothing_is_known_of_a_model_with_two_inputs() -> None:
    assert find_example(TwoInputs()) is None


def test_optional_inputs_do_not_count() -> None:
    assert shape_of(OneInput()) == (2, 3)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.LazyLinear(2), nn.LazyConv2d(2, 3), nn.Module()])
def test_nothing_is_known_without_a_layer_that_has_channels(model: nn.Module) -> None:
    assert find_example(model) is None


def test_model_and_global_random_state_are_not_touched(unchanged: Watch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)).train()
    model[1].eval()
    check = unchanged(model)
    assert find_example(model, training=True) is not None
    assert model.training
    check()


class Odd(OneInput):
    """Has the names that the searches ask for, and none of them means what they expect."""

    pretrained_cfg = property(lambda self: {"input_size": 7})
    default_cfg = "none"
    config = 3
    transform = None


def test_declarations_that_make_no_sense_are_passed_over() -> None:
    assert shape_of(Odd()) == (2, 3)


class Declared(nn.Module):
    """As timm does it."""

    def __init__(self, **declared: Any) -> None:
        super().__init__()
        self.pretrained_cfg = declared
        self.stem = nn.Conv2d(declared.pop("built", 3), 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x)


def test_size_that_timm_declares_is_taken() -> None:
    example = found(Declared(input_size=(3, 20, 30), fixed_input_size=False))
    assert example.args[0].shape == (2, 3, 20, 30)
    assert example.source == "timm's pretrained_cfg"


def test_channels_that_were_built_win_over_those_that_timm_declares() -> None:
    assert shape_of(Declared(input_size=(3, 20, 30), first_conv="stem", built=1)) == (2, 1, 20, 30)


def test_timm_vision_transformer_of_another_size_runs() -> None:
    timm = pytest.importorskip("timm")
    options = {"depth": 1, "embed_dim": 12, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), in_chans=1, **options)
    assert shape_of(model) == (2, 1, 64, 96)


@pytest.fixture
def models() -> ModuleType:
    return pytest.importorskip("torchvision").models


def test_torchvision_vision_transformer_gets_its_image_size(models: ModuleType) -> None:
    transformer = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    assert shape_of(transformer) == (2, 3, 32, 32)
    assert shape_of(nn.Sequential(transformer, nn.ReLU())) == (2, 3, 32, 32)


@pytest.mark.slow
def test_torchvision_inception_gets_299_pixels_which_its_training_head_needs(models: ModuleType) -> None:
    with torch.device("meta"):
        model = models.inception_v3(weights=None, init_weights=False).train()
    example = find_example(model, training=True)
    assert example is not None
    assert model(example.args[0].to("meta")).aux_logits.shape == (2, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("r3d_18", (2, 3, 16, 112, 112)),
        ("s3d", (2, 3, 16, 224, 224)),
        ("mvit_v2_s", (2, 3, 16, 224, 224)),
        ("raft_small", (2, 3, 128, 128)),
    ],
)
def test_torchvision_clips_and_pairs_have_a_size_that_fits(
    models: ModuleType, name: str, shape: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = models.get_model(name, weights=None).eval()
    example = find_example(model)
    assert example is not None
    assert example.args[0].shape == shape
    with torch.no_grad():
        model(*(value.to("meta") for value in example.args))


def detector(models: ModuleType, kind: str) -> nn.Module:
    """Return a small detection model: 64 pixels, and a backbone of two layers."""
    detection = models.detection
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8
    anchors = detection.rpn.AnchorGenerator(((16, 32),), ((1.0,),))
    options = {"min_size": 64, "max_size": 96, "rpn_anchor_generator": anchors}
    pool = pytest.importorskip("torchvision").ops.MultiScaleRoIAlign(["0"], 7, 2)
    options |= {"num_classes": 3, "box_roi_pool": pool}
    return {
        "FasterRCNN": lambda: detection.FasterRCNN(backbone, **options),
        "MaskRCNN": lambda: detection.MaskRCNN(backbone, mask_roi_pool=pool, **options),
        "KeypointRCNN": lambda: detection.KeypointRCNN(
            backbone, keypoint_roi_pool=pool, **(options | {"num_classes": 2}), num_keypoints=5
        ),
    }[kind]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("FasterRCNN", {"boxes", "labels"}),
        ("MaskRCNN", {"boxes", "labels", "masks"}),
        ("KeypointRCNN", {"boxes", "labels", "keypoints"}),
    ],
)
def test_torchvision_detection_gets_images_and_for_training_targets(
    models: ModuleType, kind: str, keys: set[str]
) -> None:
    model = detector(models, kind)
    (images,) = found(model, training=False).args
    assert len(images) == 1
    images, targets = found(model, training=True).args
    assert len({image.shape for image in images}) == 2
    for image, target in zip(images, targets, strict=True):
        assert target.keys() == keys
        assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()
        assert (target["boxes"][:, 2:] <= torch.tensor([image.shape[2], image.shape[1]])).all()
        assert target.get("masks", torch.ones(1, 1, 1)).flatten(1).any(1).all()


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**SMALL, "vocab_size": 50}
VISION = {**SMALL, "image_size": 32, "patch_size": 16}
SPEECH = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("Bert", TEXT, {"input_ids": (2, 12), "attention_mask": (2, 12)}),
        ("Llama", {**TEXT, "pad_token_id": 0}, {"input_ids": (2, 12), "attention_mask": (2, 12)}),
        (
            "T5",
            {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
            {"input_ids": (2, 12), "attention_mask": (2, 12), "decoder_input_ids": (2, 12)},
        ),
        ("ViT", {**VISION, "num_channels": 1}, {"pixel_values": (2, 1, 32, 32)}),
        (
            "CLIP",
            {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": VISION},
            {"input_ids": (2, 12), "pixel_values": (2, 3, 32, 32), "attention_mask": (2, 12)},
        ),
        ("VideoMAE", {**VISION, "num_frames": 4}, {"pixel_values": (2, 4, 3, 32, 32)}),
        (
            "Whisper",
            {**SPEECH, "vocab_size": 50, "num_mel_bins": 8, "max_source_positions": 30, "pad_token_id": 0},
            {"input_features": (2, 8, 60), "decoder_input_ids": (2, 12)},
        ),
        (
            "Wav2Vec2",
            {**SMALL, "num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 4},
            {"input_values": (2, 4800)},
        ),
    ],
)
def test_transformers_model_gets_what_its_config_tells(
    name: str, options: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    example = found(model)
    inputs = {key: value for key, value in example.kwargs.items() if key != "use_cache"}
    assert {key: tuple(value.shape) for key, value in inputs.items()} == shapes
    assert example.source == f"the {name}Config of transformers"
    assert example.kwargs.keys() <= inspect.signature(model.forward).parameters.keys()


def test_transformers_tokens_are_no_special_ones_but_for_the_end() -> None:
    transformers = pytest.importorskip("transformers")
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    config = transformers.BartConfig(**SPEECH, vocab_size=6, max_position_embeddings=32, **special)
    tokens = found(transformers.BartForSequenceClassification(config)).kwargs["input_ids"]
    assert set(tokens[:, :-1].flatten().tolist()) <= {2, 4, 5}
    assert set(tokens[:, -1].tolist()) == {3}


def test_transformers_inputs_that_nobody_can_build_are_dummy_inputs() -> None:
    class Dummy(nn.Module):
        config = object()
        main_input_name = "tea_leaves"
        dummy_inputs = {"tea_leaves": 3}

        def forward(self, tea_leaves: int) -> int:
            return tea_leaves

    assert find_example(Dummy()) == Example((), {"tea_leaves": 3}, "transformers' dummy_inputs")


def test_first_layer_is_no_guide_to_a_transformers_model() -> None:
    class Session(nn.Sequential):
        config = object()
        main_input_name = "inference_session"

    assert find_example(Session(nn.Linear(3, 2))) is None


def test_transformers_config_that_tells_too_little_means_that_nothing_is_known() -> None:
    class Hearing(nn.Module):
        config = types.SimpleNamespace()
        main_input_name = "input_features"

        def forward(self, input_features: Tensor) -> Tensor:
            return input_features

    assert find_example(Hearing()) is None


def test_example_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        as_example(torch.rand(1)).source = "x"  # type: ignore[misc]


def test_models_that_pass_inputs_on_take_what_their_child_takes() -> None:
    class PassesAll(nn.Module):
        def __init__(self, child: nn.Module) -> None:
            super().__init__()
            self.child = child

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.child(*args, **kwargs)

    convolution = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    for model, path in (
        (nn.DataParallel(convolution), "module.0"),
        (PassesAll(PassesAll(convolution)), "child.child.0"),
    ):
        extractor = featx.create_feature_extractor(model.eval(), [path])
        x = torch.rand(1, 3, 8, 8)
        assert torch.equal(extractor(x)[path], convolution[0](x))
