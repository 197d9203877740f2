"""Decode images to upright RGB of eight bits, whatever they are."""

from __future__ import annotations

import os
from typing import Any, cast

from featx.bulk.extras import require

# Formats in which Pillow has 16 bits as mode "I".
_OF_SIXTEEN_BITS = ("PNG", "PPM")
_SIXTEEN_BITS = 257  # 65535 / 255


def decode_image(item: Any) -> Any:
    """Return an image of Pillow in RGB.

    It is turned as its EXIF data says, 16 bits become 8 by their upper ones, and of an animation the first frame is
    taken. What Pillow calls a decompression bomb is an error, and so are pixels of 32 bits.

    Args:
        item: a path, an open file, the bytes of one, or an image of Pillow.

    Raises:
        TypeError: it is none of these.
        ValueError: its pixels have 32 bits.
    """
    image: Any = require("PIL.Image", "Pillow decodes images", "pillow")
    operations: Any = require("PIL.ImageOps", "Pillow decodes images", "pillow")
    if isinstance(item, image.Image):
        return _in_rgb(operations.exif_transpose(item), item.format)
    if isinstance(item, dict) and "bytes" in item:  # of datasets, undecoded
        item = item["path"] if item["bytes"] is None and "path" in item else item["bytes"]
    if isinstance(item, bytes):
        from io import BytesIO

        item = BytesIO(item)
    if isinstance(item, dict):
        raise TypeError(
            f"the sample is a dict of {', '.join(map(repr, cast('dict[Any, Any]', item)))}; give column=..., the key "
            "of the image, or load=..., a function that makes the input"
        )
    if not isinstance(item, (str, os.PathLike)) and not hasattr(item, "read"):
        raise TypeError(
            f"the sample is a {type(item).__name__}, and no image, array or tensor; give load=..., a function that "
            "makes the input"
        )
    with image.open(item) as opened:
        opened.seek(0)
        return _in_rgb(operations.exif_transpose(opened), opened.format)


def _in_rgb(image: Any, format: str | None) -> Any:
    if image.mode == "F" or (image.mode == "I" and format not in _OF_SIXTEEN_BITS):
        raise ValueError(
            f"a pixel has 32 bits (mode {image.mode}), and what is white is not known; give load=..., a function that "
            "scales it"
        )
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip
        return image.convert("I").point(lambda value: value * (1 / _SIXTEEN_BITS) + 0.5).convert("L").convert("RGB")
    return image.convert("RGB")


def decoder() -> str:
    """Return which decoder this is: others give other pixels."""
    return f"pillow {require('PIL', 'Pillow decodes images', 'pillow').__version__}, upright RGB"
