"""Turn a model, and nothing else, into inputs with which it can be run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from featx.examples.example import Example
from featx.examples.layers import from_layer, guesses_from_layer
from featx.examples.question import UNKNOWN, Question
from featx.examples.transformers_inputs import from_transformers


def find_example(model: nn.Module, training: bool = False) -> Example | None:
    """Return inputs with which `model` can be run, or None where nothing is known of it.

    What the model declares comes first (timm, transformers, torchvision), then its first layer whose number of
    channels is known. A module that passes on whatever it is given to its one child, as `nn.DataParallel` and models of
    peft do, takes what the child takes. The model is not run and not changed; of one that finds images in texts, the
    part that sees images runs on a copy. The batch has two samples, so that batch norm works in train mode; values come
    from a generator of their own, are the same each time, and are on the CPU.

    Args:
        model: any module.
        training: whether train mode needs more, as the targets of torchvision's detection models.
    """
    try:
        ask = Question(model, training)
    except (TypeError, ValueError):
        return None
    children = list(model.children())
    if ask.is_variadic and len(children) == 1:
        return find_example(children[0], training)
    for search in (_from_timm, from_transformers, _from_torchvision, from_layer):
        try:
            example = search(ask)
        except UNKNOWN:
            continue
        if example is not None:
            return example
    return None


def other_guesses(model: nn.Module, training: bool = False) -> Iterator[Example]:
    """Yield further inputs for a model that does not run with those which its first layer seems to take.

    They are of other sizes, or have a dimension more. Each is made when it is asked for.
    """
    try:
        yield from islice(guesses_from_layer(Question(model, training)), 1, None)
    except UNKNOWN:
        return


def _from_timm(ask: Question) -> Example | None:
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
    # tresnet folds 4 x 4 pixels into channels before its first convolution.
    channels = channels if built == 16 * channels else built
    return channels, *(getattr(getattr(model, "patch_embed", None), "img_size", None) or sides)


def _from_torchvision(ask: Question) -> Example | None:
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
