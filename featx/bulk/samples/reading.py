"""Make what the model takes of the items of a source: decode, and do the transform that runs beside the model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from featx.bulk.samples.decode import decode_image, decoder
from featx.bulk.samples.lists import IMAGE_COLUMNS
from featx.bulk.samples.preprocessing import Preprocessing, find_preprocessing, plain, text_of
from featx.errors import ArgumentTypeError
from featx.features.adaptive import AdaptiveExtractor


@dataclass(frozen=True)
class RowOfTokens:
    """Makes inputs by name of a row of a tokenized data set: of the columns of numbers that the model takes."""

    names: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module) -> RowOfTokens:
        """Return what makes the inputs of a model."""
        return RowOfTokens(tuple(name for name in _parameters(model) if name not in ("labels", "label")))

    def __call__(self, row: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the inputs.

        Raises:
            TypeError: the model has no input of the name of a column.
        """
        given = {name: row[name] for name in self.names if row.get(name) is not None}
        if not given:
            raise TypeError(
                f"the model has no input of the name of a column ({', '.join(row)}); make its inputs of a row, by "
                "load=..."
            )
        return {name: torch.as_tensor(value) for name, value in given.items() if not isinstance(value, str)}


@dataclass(frozen=True)
class Reader:
    """Makes an input of an item of a source. It is sent to the processes that read.

    Attributes:
        load: makes an input of an item; without one, images are decoded.
        preprocessing: what is done to an image, or to what `load` returns.
        takes_whole: whether `load` takes an item as it is; otherwise it takes the first part of a tuple or list.
        takes_several: whether the model may have several inputs by position.
    """

    load: Callable[[Any], Any] | None
    preprocessing: Preprocessing
    takes_whole: bool = False
    takes_several: bool = False

    @staticmethod
    def of(
        model: nn.Module, transform: Callable[[Any], Any] | None, load: Callable[[Any], Any] | None, *,
        has_tokens: bool = False,
    ) -> Reader:  # fmt: skip
        """Return the reader for a model; without `load` and `transform` it has the preprocessing of the model.

        `has_tokens`: items are rows of a tokenized data set.
        """
        if load is not None:
            return Reader(load, plain(transform), takes_whole=True)
        takes_several = _takes_several(model)
        if has_tokens:
            return Reader(RowOfTokens.of(model), plain(transform), takes_several=takes_several)
        return Reader(None, find_preprocessing(model, transform), takes_several=takes_several)

    def __call__(self, item: Any) -> Any:
        """Return the input."""
        item = self.part(item)
        value = self._decoded(item) if self.load is None else _with_tensors(self.load(item))
        return self.preprocessing.early(value)

    def part(self, item: Any) -> Any:
        """Return what an input is made of: the item, or the first part of an image with its label.

        Raises:
            ArgumentTypeError: another part may be an input of the model too.
        """
        if self.takes_whole or not isinstance(item, (tuple, list)):
            return item
        parts = cast("Sequence[Any]", item)
        further = next((number for number, part in enumerate(parts[1:], 2) if _has_several_numbers(part)), None)
        if further is not None and self.takes_several:
            raise ArgumentTypeError(
                f"a sample has {len(parts)} parts, and part {further} of the shape {tuple(parts[further - 1].shape)} "
                "may be an input of the model, which takes several, or a label; give load=..., a function that makes "
                "the inputs of a sample, by their names: lambda sample: {'input_ids': sample[0], 'attention_mask': "
                "sample[1]}"
            )
        return parts[0]

    def _decoded(self, item: Any) -> Any:
        if isinstance(item, dict) and "bytes" not in item:  # a sample of a torch Dataset
            sample = cast("dict[str, Any]", item)
            item = next((sample[name] for name in IMAGE_COLUMNS if name in sample), sample)
        if not hasattr(item, "dtype"):  # neither a tensor nor an array of numpy
            return decode_image(item)
        if self.preprocessing.is_declared:
            kind = "tensors" if isinstance(item, torch.Tensor) else "arrays"
            raise ArgumentTypeError(
                f"the samples are {kind}, and the preprocessing that the model declares is for images, and normalizes "
                f"them; give transform=torch.nn.Identity() if they are what the model takes, or a transform of {kind}"
            )
        return item

    @property
    def decoder(self) -> str:
        """What decodes, with its version, or what `load` is."""
        return decoder() if self.load is None else text_of(self.load)


def _has_several_numbers(part: Any) -> bool:
    """Say whether a part of a sample is a tensor or an array of more than one number; one is a label."""
    return bool(getattr(part, "ndim", 0)) and math.prod(part.shape) > 1


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward of a model, or of the model in an extractor, by name."""
    model = model.traced_model if isinstance(model, AdaptiveExtractor) else model
    return inspect.signature(model.forward).parameters


def _takes_several(model: nn.Module) -> bool:
    kinds = [each.kind for each in _parameters(model).values()]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in by_position for kind in kinds) > 1


def _with_tensors(loaded: Any) -> Any:
    """Return what `load` gives; what a tokenizer returns becomes a dict, with tensors in the place of its lists."""
    if not isinstance(loaded, Mapping):
        return loaded
    items = cast("Mapping[str, Any]", loaded).items()
    return {name: torch.tensor(value) if _are_numbers(value) else value for name, value in items}


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) in (bool, int, float) for each in value)
