"""Turn a model, and nothing else, into inputs with which it can be run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from featx.errors import ArgumentTypeError
from featx.tree import tree_leaves, tree_map

# What asking strangers raises: a config that lacks a value, has one of another kind, or one that fits nothing.
_UNKNOWN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_TEXT_LENGTH, _SAMPLES, _FRAMES, _PATCHES = 12, 4800, 200, 8
_DRAWS = 16381  # prime, so that no two rows of an image are the same
_CONVOLUTION_SIZES = {1: (64,), 2: (224, 224), 3: (16, 112, 112)}
_NORM_SIZES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (32, 32), nn.BatchNorm3d: (8, 16, 16)}


@dataclass(frozen=True)
class Example:
    """Inputs of a model.

    Attributes:
        args: positional ones.
        kwargs: those by name.
        source: where they come from, for messages: "the first Conv2d".
        is_for_one_mode: whether the other of train and eval mode takes other inputs.
    """

    args: tuple[Any, ...]  # Any: models take anything
    kwargs: dict[str, Any]
    source: str
    is_for_one_mode: bool = False

    def options(self) -> dict[str, Any]:
        """Return the inputs by name that hold no tensor, such as `use_cache=False`."""
        return {
            name: value
            for name, value in self.kwargs.items()
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        }

    def with_options(self, options: Mapping[str, Any], forward: Callable[..., Any]) -> Example:
        """Return these inputs with those of `options` that are not among them."""
        if not options:
            return self
        given = inspect.signature(forward).bind_partial(*self.args, **self.kwargs).arguments
        further = {name: value for name, value in options.items() if name not in given}
        return replace(self, kwargs={**further, **self.kwargs})

    def without_values(self) -> Example:
        """Return these inputs with tensors on the meta device in place of those of floating point."""
        args, kwargs = tree_map(_without_values, (self.args, self.kwargs))
        return Example(args, kwargs, self.source, self.is_for_one_mode)


def _without_values(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


def as_example(example_inputs: Any) -> Example:
    """Return what a caller gave: a tensor, a tuple or list of positional inputs, or a dict of keyword inputs.

    Raises:
        ArgumentTypeError: it is something else, or the keys of the dict are no strings.
    """
    source = "example_inputs"
    if isinstance(example_inputs, Example):
        return example_inputs
    if isinstance(example_inputs, Tensor):
        return Example((example_inputs,), {}, source)
    if isinstance(example_inputs, (tuple, list)):
        refuse_shape(cast("list[Any]", example_inputs), f"example_inputs={example_inputs!r:.80}")
        return Example(tuple(cast("list[Any]", example_inputs)), {}, source)
    if isinstance(example_inputs, Mapping):
        inputs = dict(cast("Mapping[Any, Any]", example_inputs))
        if all(isinstance(key, str) for key in inputs):
            return Example((), inputs, source)
    raise ArgumentTypeError(
        f"example_inputs must be a tensor, a tuple of positional inputs or a dict from parameter names of forward to "
        f"inputs, got {example_inputs!r:.80}; pass example_inputs=torch.rand(1, 3, 224, 224), say"
    )


def refuse_shape(values: Sequence[Any], what: str) -> None:
    """Raise if what is given as inputs is the shape of one.

    Raises:
        ArgumentTypeError: it is.
    """
    if len(values) > 2 and all(type(value) is int for value in values):
        sizes = ", ".join(map(str, values))
        raise ArgumentTypeError(f"{what} is a shape; give a tensor of it, torch.rand({sizes})")


def inputs_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], example_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a call: those that are given as in a call, or those in `example_inputs`.

    Raises:
        ArgumentTypeError: both are given, or as for `as_example`.
    """
    if example_inputs is None:
        return args, dict(kwargs)
    if args or kwargs:
        raise ArgumentTypeError("give the inputs as in a call of the model, or as example_inputs, not both")
    example = as_example(example_inputs)
    return example.args, example.kwargs


def find_example(model: nn.Module, training: bool = False) -> Example | None:
    """Return inputs with which `model` can be run, or None where nothing is known of it.

    What the model declares comes first (timm, transformers, torchvision), then its first layer whose number of
    channels is known. A module that passes on whatever it is given to its one child, as `nn.DataParallel` and models of
    peft do, takes what the child takes. The model is not run and not changed. The batch has two samples, so that batch
    norm works in train mode; values come from a generator of their own, are the same each time, and are on the CPU.

    Args:
        model: any module.
        training: whether train mode needs more, as the targets of torchvision's detection models.
    """
    try:
        ask = _Question(model, training)
    except (TypeError, ValueError):
        return None
    children = list(model.children())
    if ask.is_variadic and len(children) == 1:
        return find_example(children[0], training)
    for search in (_from_timm, _from_transformers, _from_torchvision, _from_layer):
        try:
            example = search(ask)
        except _UNKNOWN:
            continue
        if example is not None:
            return example
    return None


class _Question:
    """A model, what its forward takes, and the generator that the values come from."""

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model
        self.training = training
        self.parameters = dict(inspect.signature(model.forward).parameters)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [each for each in self.parameters.values() if each.kind not in variadic]
        # Whether it takes `*args` and `**kwargs`, and nothing else.
        self.is_variadic = not named and len(self.parameters) == 2
        needed = [each for each in named if each.default is each.empty]
        self.required = [parameter.name for parameter in needed]
        floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        self._dtype = next(floating, torch.float32)
        self._generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        # The caller may have set another default device, which the generator would not fit. A large image has the same
        # draws again and again: to draw them all, or to wake torch's threads, takes as long as tracing a small model.
        values = torch.empty(math.prod(shape), device="cpu", dtype=torch.float32)
        draws = torch.rand(_DRAWS, generator=self._generator, device="cpu", dtype=torch.float32)
        for piece in values.split(_DRAWS):
            piece.copy_(draws[: len(piece)])
        return values.view(shape).to(self._dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device="cpu")


def _from_timm(ask: _Question) -> Example | None:
    for name in ("pretrained_cfg", "default_cfg"):
        declared = getattr(ask.model, name, None)
        size = None if declared is None else declared.get("input_size")
        if size is not None:
            return Example((ask.floats(2, *_as_built(ask.model, declared, size)),), {}, f"timm's {name}")
    return None


def _as_built(model: nn.Module, declared: Any, size: tuple[int, int, int]) -> tuple[int, ...]:
    """Return `size` with what `create_model(in_chans=..., img_size=...)` changed; the declaration does not tell."""
    channels, *sides = size
    first = declared.get("first_conv")
    layer = dict(model.named_modules()).get(first) if isinstance(first, str) else None
    built = getattr(layer, "in_channels", channels)
    # tresnet folds 4 x 4 pixels into channels ahead of its first convolution.
    channels = channels if built == 16 * channels else built
    return channels, *(getattr(getattr(model, "patch_embed", None), "img_size", None) or sides)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the option that switches off a cache of keys and values, an object that no graph can hold, if any."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _from_transformers(ask: _Question) -> Example | None:
    config, main = getattr(ask.model, "config", None), getattr(ask.model, "main_input_name", None)
    if config is None or main is None:
        return None
    try:
        inputs = _TransformersInputs(ask, config)
        kwargs = {name: getattr(inputs, name)() for name in inputs.names([main] if isinstance(main, str) else main)}
    except _UNKNOWN:
        kwargs = dict(cast("Any", ask.model).dummy_inputs)
        if not set(ask.required) <= kwargs.keys() <= ask.parameters.keys():
            return None
        return Example((), kwargs, "transformers' dummy_inputs")
    if not kwargs:
        return None
    kwargs |= without_cache(ask.model)
    return Example((), kwargs, f"the {type(config).__name__} of transformers")


class _TransformersInputs:
    """The inputs of a transformers model: a method each, with the name that they have in forward."""

    def __init__(self, ask: _Question, config: Any) -> None:  # Any: transformers need not be there
        self._ask = ask
        self._config = config
        self._configs = list(_nested(config))
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))

    def names(self, main: list[str]) -> list[str]:
        """Return which parameters of forward to give, in its order."""
        parameters = self._ask.parameters
        wanted = {*main, *self._ask.required}
        has_image_tokens = self._find("image_token_id", "image_token_index", "audio_token_id") is not None
        if "input_ids" in wanted and not has_image_tokens and not self._is_encoder_decoder:
            wanted.add("pixel_values")  # as CLIP; others see images as tokens, and take text alone too
            if hasattr(self._ask.model, "get_text_features"):
                wanted.add("input_features")  # as CLAP
        if "pixel_values" in wanted and not has_image_tokens:
            wanted.add("input_ids")
        if self._is_encoder_decoder:
            wanted.add("decoder_input_ids")
        if "input_ids" in wanted & parameters.keys():
            wanted.add("attention_mask")
        if "input_features" in wanted:
            wanted.add("input_features_mask")
        return [name for name in parameters if name in wanted]

    def input_ids(self) -> Tensor:
        return self._tokens(self._config.get_text_config())

    def decoder_input_ids(self) -> Tensor:
        return self._tokens(self._config.get_text_config(decoder=True))

    def attention_mask(self) -> Tensor:
        return torch.ones(2, _TEXT_LENGTH, dtype=torch.int64, device="cpu")

    def pixel_values(self) -> Tensor:
        if "grid_thw" in self._ask.required:
            return self.hidden_states()
        frames = self._find("num_frames")
        images = (2,) if frames is None else (2, frames)
        return self._ask.floats(*images, *self._image())

    def pixel_values_videos(self) -> Tensor:
        return self._ask.floats(2, self._find("num_frames", "frames_per_clip") or 8, *self._image())

    def hidden_states(self) -> Tensor:
        """Return flat patches of two images, as the encoders of Qwen-VL take them."""
        patch = self._find("patch_size")
        width = self._image()[0] * (self._find("temporal_patch_size", "patch_temporal") or 1) * patch * patch
        return self._ask.floats(2 * _PATCHES * _PATCHES, width)

    def grid_thw(self) -> Tensor:
        return torch.tensor([[1, _PATCHES, _PATCHES]] * 2, device="cpu")

    def input_values(self) -> Tensor:
        """Return sounds: spectrograms, waves, or waves with channels."""
        if self._find("max_length") is not None and self._find("num_mel_bins") is not None:
            return self._ask.floats(2, self._find("max_length"), self._find("num_mel_bins"))
        if hasattr(self._config, "conv_dim") or self._is_encoder_decoder:
            return self._ask.floats(2, _SAMPLES)
        return self._ask.floats(2, int(self._find("audio_channels") or 1), _SAMPLES)

    def input_features(self) -> Tensor:
        """Return spectrograms: time first, or channels first for models that begin with a Conv1d over time."""
        width = self._width()
        first = next((layer for layer in self._ask.model.modules() if isinstance(layer, nn.Conv1d)), None)
        if first is None or first.in_channels != width or self._find("input_feat_per_channel") is not None:
            return self._ask.floats(2, _FRAMES, width)
        positions = self._find("max_source_positions")  # whisper takes one length only, and halves it
        return self._ask.floats(2, width, 2 * positions if positions else _FRAMES)

    def input_features_mask(self) -> Tensor:
        frames = self.input_features().numel() // (2 * self._width())
        return torch.ones(2, frames, dtype=torch.int64, device="cpu")

    def _width(self) -> int:
        names = "feature_projection_input_dim input_feat_per_channel input_dim feature_size num_mel_bins input_size"
        widths = [value for value in map(self._find, names.split()) if value is not None]
        return int(widths[0])

    def past_values(self) -> Tensor:
        channels = self._find("num_input_channels")
        return self._ask.floats(2, self._find("context_length"), *([] if channels is None else [channels]))

    def _tokens(self, config: Any) -> Tensor:
        """Return two texts without special tokens, some of which must come with an image; only the end is told."""
        special = {number for config in self._configs for number in _special_tokens(config)}
        plain = [token for token in range(config.vocab_size) if token not in special]
        tokens = torch.tensor(plain, device="cpu")[self._ask.integers(len(plain), 2, _TEXT_LENGTH)]
        end = getattr(config, "eos_token_id", None)
        if self._is_encoder_decoder and isinstance(end, int) and end < config.vocab_size:
            tokens[:, -1] = end
        return tokens

    def _image(self) -> tuple[int, int, int]:
        channels = self._find("num_channels", "in_channels", "in_chans") or 3
        size = self._find("image_size", "img_size", "crop_size") or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return channels, height, width

    def _find(self, *names: str) -> Any:
        """Return the first value of one of these names, in the config or in one inside it."""
        for config in self._configs:
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return None


def _nested(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _nested(value)


def _special_tokens(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")):
            yield from value if isinstance(value, list) else [value]


def _from_torchvision(ask: _Question) -> Example | None:
    model = ask.model
    if ask.required[:2] == ["image1", "image2"]:  # RAFT
        pair = ask.floats(2, 3, 128, 128), ask.floats(2, 3, 128, 128)
        return Example(pair, {}, "torchvision's optical flow")
    transform = getattr(model, "transform", None)
    if not (hasattr(transform, "min_size") and hasattr(transform, "image_mean") and "targets" in ask.parameters):
        return None
    # Most calls for inference have one image. Training takes several, and their targets; images as long as these have
    # few pixels when the model has scaled them, by their longer side.
    images = [ask.floats(3, 64, 640), ask.floats(3, 72, 640)] if ask.training else [ask.floats(3, 128, 160)]
    inputs = (images, [_target(model, image) for image in images]) if ask.training else (images,)
    return Example(inputs, {}, "torchvision's detection", is_for_one_mode=True)


def _target(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return two objects in `image`, with a mask and keypoints where `model` learns them."""
    boxes = image.new_tensor([[8, 8, 72, 56], [40, 16, 120, 48]])
    target = {"boxes": boxes, "labels": torch.ones(2, dtype=torch.int64, device="cpu")}
    heads = getattr(model, "roi_heads", None)
    if getattr(heads, "mask_predictor", None) is not None:
        masks = torch.zeros(2, *image.shape[-2:], dtype=torch.uint8, device="cpu")
        masks[0, 16:48, 16:64] = masks[1, 24:40, 48:112] = 1
        target["masks"] = masks
    predictor = getattr(heads, "keypoint_predictor", None)
    if predictor is not None:
        count = predictor.kps_score_lowres.out_channels
        seen = image.new_tensor(1).expand(2, count, 1)
        centres = (boxes[:, None, :2] + boxes[:, None, 2:]).expand(2, count, 2) / 2
        target["keypoints"] = torch.cat([centres, seen], dim=2)
    return target


def _from_layer(ask: _Question) -> Example | None:
    """Return one input for the first layer, in the order of registration, that says what it takes."""
    names = ask.required
    if len(names) != 1 or ask.parameters[names[0]].kind is inspect.Parameter.KEYWORD_ONLY:
        return None
    if hasattr(ask.model, "main_input_name"):  # parts of transformers models take what their first layer does not
        return None
    for layer in ask.model.modules():
        value = _input_of(layer, ask)
        if value is not None:
            return Example((value,), {}, f"the first {type(layer).__name__}")
    return None


def _input_of(layer: nn.Module, ask: _Question) -> Tensor | None:
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        size = _declared_size(ask.model, len(layer.kernel_size))
        return ask.floats(2, layer.in_channels, *size) if layer.in_channels else None
    if isinstance(layer, nn.Linear):
        return ask.floats(2, layer.in_features) if layer.in_features else None
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return ask.integers(layer.num_embeddings, 2, 16)
    if isinstance(layer, nn.RNNBase):
        return ask.floats(*((2, 5) if layer.batch_first else (5, 2)), layer.input_size)
    for kind, size in _NORM_SIZES.items():
        if isinstance(layer, kind):
            return ask.floats(2, layer.num_features, *size) if layer.num_features else None
    if isinstance(layer, nn.LayerNorm):
        return ask.floats(2, *layer.normalized_shape)
    return None


def _declared_size(model: nn.Module, dimensions: int) -> tuple[int, ...]:
    """Return the size that a model of torchvision was built for, `model` or one inside it, or else a usual one."""
    for module in model.modules():
        parts: dict[str, Any] = module._modules
        side = vars(module).get("image_size")
        if dimensions == 2 and isinstance(side, int):
            return side, side
        if dimensions == 2 and "Mixed_7c" in parts:  # Inception3: the head for training fits one size only
            return 299, 299
        position, stem = parts.get("pos_encoding"), parts.get("conv_proj")
        if dimensions == 3 and position is not None and isinstance(stem, nn.Conv3d):  # MViT
            grid = (position.temporal_size, *position.spatial_size)
            return tuple(count * stride for count, stride in zip(grid, stem.stride, strict=True))
        if dimensions == 3 and isinstance(module, nn.AvgPool3d):  # S3D: its pool is as large as what is left of 224
            return 16, 224, 224
    return _CONVOLUTION_SIZES[dimensions]
