"""Inputs of the models of transformers, from their configs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from featx.examples.example import Example
from featx.examples.image_tokens import ImagesInText, flat_images_for_text, images_for_text
from featx.examples.question import UNKNOWN, Question

_TEXT_LENGTH, _SAMPLES, _FRAMES, _PATCHES = 12, 4800, 200, 8


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the option that switches off a cache of keys and values, an object that no graph can hold, if any."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def from_transformers(ask: Question) -> Example | None:
    """Return inputs for a model of transformers; None for other models."""
    config, main = getattr(ask.model, "config", None), getattr(ask.model, "main_input_name", None)
    if config is None or main is None:
        return None
    try:
        kwargs = _TransformersInputs(ask, config).of([main] if isinstance(main, str) else main)
    except UNKNOWN:
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

    def __init__(self, ask: Question, config: Any) -> None:  # Any: transformers need not be there
        self._ask = ask
        self._config = config
        self._configs = list(_nested(config))
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))

    def of(self, main: list[str]) -> dict[str, Tensor]:
        """Return the inputs by name, in the order of forward, which has `main` among them."""
        images = self._images
        given: dict[str, Tensor] = {}
        for name in self._names(main):
            given[name] = images.inputs[name] if images and name in images.inputs else getattr(self, name)()
        return given

    def _names(self, main: list[str]) -> list[str]:
        parameters = self._ask.parameters
        wanted = {*main, *self._ask.required}
        has_image_tokens = self._find("image_token_id", "image_token_index", "audio_token_id") is not None
        if self._images is not None:
            wanted |= {*self._images.inputs, "mm_token_type_ids", "token_type_ids"}
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
        return self._input_ids.clone()

    @cached_property
    def _input_ids(self) -> Tensor:
        return self._tokens(self._config.get_text_config())

    def decoder_input_ids(self) -> Tensor:
        return self._tokens(self._config.get_text_config(decoder=True))

    def attention_mask(self) -> Tensor:
        return torch.ones_like(self.input_ids())

    def mm_token_type_ids(self) -> Tensor:
        """Return which tokens are an image."""
        return (self.input_ids() == self._image_token()).long()

    token_type_ids = mm_token_type_ids

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
        if self._images is not None:
            tokens = torch.cat([tokens[:, :2], self._tokens_of_image(), tokens[:, 2:]], 1)
        end = getattr(config, "eos_token_id", None)
        if self._is_encoder_decoder and isinstance(end, int) and end < config.vocab_size:
            tokens[:, -1] = end
        return tokens

    def _image_token(self) -> Any:
        return self._find("image_token_id", "image_token_index")

    def _tokens_of_image(self) -> Tensor:
        assert self._images is not None
        start, end = self._find("vision_start_token_id"), self._find("vision_end_token_id")
        around = [[] if token is None else [token] for token in (start, end)]
        tokens = [*around[0], *[self._image_token()] * self._images.count, *around[1]]
        return torch.tensor([tokens] * 2, device="cpu")

    @cached_property
    def _images(self) -> ImagesInText | None:
        """The images that come with the texts of a vision-language model, if it is one."""
        token = self._image_token()
        if "input_ids" not in self._ask.parameters or not isinstance(token, int):
            return None
        if token >= cast("Any", self._ask.model).get_input_embeddings().num_embeddings:
            return None
        if "image_grid_thw" in self._ask.parameters:
            merged = self._find("spatial_merge_size", "merge_size") or 1
            return flat_images_for_text(self._ask, self.hidden_states(), self.grid_thw(), merged)
        return images_for_text(self._ask, self._image())

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
