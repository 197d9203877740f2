"""Pooling of sequences whose dimensions a number alone does not tell: texts beside images, and the length first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import featx
from featx import Feature

PATCHES, WIDTH = 16, 8


class TwoTowers(nn.Module):
    """Gives tokens of an image, a class token ahead, and of a text, which may attend to those of the image."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls_token = nn.Parameter(torch.rand(1, 1, WIDTH))
        self.image = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(20, WIDTH)
        self.text = nn.Linear(WIDTH, WIDTH)
        self.attends = attends

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> Tensor:
        patches = self.patches(pixel_values).flatten(2).transpose(1, 2)
        image = self.image(torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1))
        words = self.words(input_ids)
        if self.attends:
            words = words + image.mean(1, keepdim=True)
        text = self.text(words * attention_mask[..., None])
        return text.mean(1) + image.mean(1)


def inputs_of(length: int) -> dict[str, Tensor]:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, length - 5 :] = 0
    pixels = torch.rand(2, 3, 32, 32)
    return {"input_ids": torch.randint(0, 20, (2, length)), "pixel_values": pixels, "attention_mask": mask}


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("length", [PATCHES + 1, PATCHES, 12])
def test_tokens_of_a_text_are_none_of_an_image_whatever_their_number(length: int, attends: bool) -> None:
    model = TwoTowers(attends=attends).eval()
    request = {"text": ["words", Feature("pooled", pool="avg")], "image": ["tokens", Feature("patches", pool="avg")]}
    extractor = featx.create_feature_extractor(model, request, example_inputs=inputs_of(length))
    for other in (length, PATCHES + 1, PATCHES, 9):
        inputs = inputs_of(other)
        found = extractor(**inputs)
        counts = inputs["attention_mask"].bool()[..., None]
        expected = (found["words"] * counts).sum(1) / counts.sum(1)
        torch.testing.assert_close(found["pooled"], expected)
        torch.testing.assert_close(found["patches"], found["tokens"][:, 1:].mean(1))


class Sequences(nn.Module):
    """Runs a layer that takes the length first, unless `turns`."""

    def __init__(self, kind: str, *, turns: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH) if kind == "gru" else nn.TransformerEncoderLayer(WIDTH, 2, 16)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.turns = turns

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.turns else x
        x = self.layer(x)
        x = x[0] if isinstance(x, tuple) else x
        return self.head(x.transpose(0, 1) if self.turns else x)


@pytest.mark.parametrize("kind", ["gru", "attention"])
@pytest.mark.parametrize("name", ["embed", "head"])
def test_values_that_may_have_the_length_first_are_pooled_as_they_are_said_to_be(kind: str, name: str) -> None:
    model, ids = Sequences(kind).eval(), torch.randint(0, 20, (5, 6))
    with pytest.raises(featx.RequestError, match=r"of_layout='NLC' or of_layout='LNC'"):
        featx.create_feature_extractor(model, {name: Feature("pooled", pool="avg")}, example_inputs=ids)
    request = {name: ["raw", Feature("pooled", pool="avg", of_layout="LNC")]}
    found = featx.create_feature_extractor(model, request, example_inputs=ids)(ids)
    torch.testing.assert_close(found["pooled"], found["raw"].mean(0))


@pytest.mark.parametrize("kind", ["gru", "attention"])
def test_values_of_models_that_turn_them_themselves(kind: str) -> None:
    model, ids = Sequences(kind, turns=True).eval(), torch.randint(0, 20, (5, 6))
    request = {"head": ["raw", Feature("pooled", pool="avg")]}
    found = featx.create_feature_extractor(model, request, example_inputs=ids)(ids)
    torch.testing.assert_close(found["pooled"], found["raw"].mean(1))


class Packed(nn.Module):
    """Packs sequences that have the batch first, for a layer that says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(20, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


@pytest.mark.slow
def test_packed_sequences_are_in_the_order_that_their_packing_says() -> None:
    inputs = {"ids": torch.randint(0, 20, (3, 6)), "lengths": torch.tensor([6, 4, 2])}
    request = {"head": ["raw", Feature("pooled", pool="avg")]}
    found = featx.create_feature_extractor(Packed().eval(), request, example_inputs=inputs)(**inputs)
    torch.testing.assert_close(found["pooled"], found["raw"].mean(1))
