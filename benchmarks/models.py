"""Turn the name of a torchvision or timm model into a model without pretrained weights, its family, and an input."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import timm
import torch
import torchvision
from torch import nn

Library = Literal["torchvision", "timm"]
LIBRARIES: tuple[Library, ...] = ("torchvision", "timm")

_SEED = 0
_IMAGE = (3, 224, 224)
_SMALL_SIDE = 160
# Where a torchvision model needs, or is made for, something else than one image of 224 x 224.
_TORCHVISION_INPUTS: dict[str, tuple[int, ...]] = {
    "inception_v3": (3, 299, 299),
    "quantized_inception_v3": (3, 299, 299),
    "mc3_18": (3, 16, 112, 112),
    "r2plus1d_18": (3, 16, 112, 112),
    "r3d_18": (3, 16, 112, 112),
    "mvit_v1_b": (3, 16, 224, 224),
    "mvit_v2_s": (3, 16, 224, 224),
    "s3d": (3, 16, 224, 224),
    "swin3d_b": (3, 16, 224, 224),
    "swin3d_s": (3, 16, 224, 224),
    "swin3d_t": (3, 16, 224, 224),
}


def list_names(library: Library) -> list[str]:
    """Return the names of all models of `library`, sorted."""
    return sorted(torchvision.models.list_models() if library == "torchvision" else timm.list_models())


def family_of(library: Library, name: str) -> str:
    """Return the module that defines a model, within its library: `resnet`, `segmentation.fcn`."""
    if library == "torchvision":
        return torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
    return timm.models.model_entrypoint(name).__module__.removeprefix("timm.models.")


def build(library: Library, name: str, device: str = "cpu", side: int | None = None) -> nn.Module:
    """Return a model with the weights that its own initialization draws from a fixed seed.

    With `side` it is made for images of that height and width; only some models of timm can be.
    """
    with seeded(), torch.device(device):
        if library == "timm":
            return timm.create_model(name, pretrained=False, **({} if side is None else {"img_size": side}))
        parameters = inspect.signature(torchvision.models.get_model_builder(name)).parameters
        options = {"weights_backbone": None} if "weights_backbone" in parameters else {}
        return torchvision.models.get_model(name, weights=None, **options)


def build_without_weights(library: Library, name: str, side: int | None = None) -> nn.Module:
    """Return a model on the meta device, or on the CPU where its initialization reads values."""
    try:
        return build(library, name, "meta", side)
    except (RuntimeError, NotImplementedError):
        return build(library, name, "cpu", side)


def can_be_made_for(library: Library, name: str, side: int) -> bool:
    """Say whether a model can be made for images of `side` x `side` pixels, and runs on one."""
    try:
        model = build(library, name, "meta", side)
        model(torch.empty(2, 3, side, side, device="meta"))
    except Exception:  # whatever a model raises: it cannot
        return False
    return library == "timm"


@contextmanager
def floats_of(dtype: torch.dtype) -> Generator[None, None, None]:
    """Let models and images that are made inside have weights and values of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def input_shapes(library: Library, name: str, model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of one image (channels, height, width), or clip with frames after channels, cheapest first.

    The last is the one that the model is made for. Others are smaller: the model may refuse them.
    """
    if library == "torchvision":
        return [_TORCHVISION_INPUTS.get(name, _IMAGE)]
    config: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    channels, height, width = config.get("input_size") or _IMAGE
    if config.get("fixed_input_size") or min(height, width) <= _SMALL_SIDE:
        return [(channels, height, width)]
    return [(channels, _SMALL_SIDE, _SMALL_SIDE), (channels, height, width)]


def make_input(shape: tuple[int, ...], batch: int) -> torch.Tensor:
    """Return a batch of random images or clips of `shape` from a fixed seed."""
    with seeded():
        return torch.randn(batch, *shape)


@contextmanager
def seeded() -> Generator[None, None, None]:
    """Draw from a fixed seed inside; afterwards the CPU's generator goes on where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        yield
