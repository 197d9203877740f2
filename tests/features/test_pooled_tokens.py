"""Pooling of the tokens of texts: padding does not count."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx
from featx import Feature
from featx.features.requests.pooling import pool_tokens

transformers = pytest.importorskip("transformers")
IDS = torch.randint(3, 90, (3, 9))
RIGHT = (torch.arange(9) < torch.tensor([[9], [5], [1]])).long()
LEFT = RIGHT.flip(1)
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100}


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SIZE)).eval()


def by_hand(states: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    for state, counts in zip(states, mask.bool(), strict=True):
        tokens = state[counts]
        rows.append(
            {
                "avg": tokens.mean(0),
                "max": tokens.max(0).values,
                "gem": tokens.clamp(1e-6).pow(3).mean(0).pow(1 / 3),
                "cls": tokens[0],
                "last": tokens[-1],
            }[how]
        )
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["avg", "max", "gem", "cls", "last"])
def test_padding_is_left_out(bert: Any, how: Any) -> None:
    extractor = featx.create_feature_extractor(bert, {"encoder.layer.1": Feature(pool=how)})
    assert extractor.feature_info[0].shape == (2, 32)
    for mask in (RIGHT, LEFT, torch.ones_like(IDS)):
        states = bert(IDS, attention_mask=mask).last_hidden_state
        found = extractor(input_ids=IDS, attention_mask=mask)["encoder.layer.1"]
        assert torch.allclose(found, by_hand(states, mask, how), atol=1e-6)
    states = bert(IDS).last_hidden_state
    found = extractor(input_ids=IDS)["encoder.layer.1"]
    assert torch.allclose(found, by_hand(states, torch.ones_like(IDS), how), atol=1e-6)


@pytest.mark.slow
def test_all_tokens_count_without_a_mask(bert: Any) -> None:
    extractor = featx.create_feature_extractor(bert, {"encoder.layer.1": Feature(pool="avg", mask=None)})
    states = bert(IDS, attention_mask=RIGHT).last_hidden_state
    assert torch.equal(extractor(input_ids=IDS, attention_mask=RIGHT)["encoder.layer.1"], states.mean(1))


def test_half_precision_of_many_tokens() -> None:
    tokens = torch.full((1, 4000, 2), 100.0, dtype=torch.float16)
    assert torch.equal(pool_tokens(tokens, "avg"), torch.full((1, 2), 100.0, dtype=torch.float16))


@pytest.mark.slow
def test_a_mask_that_does_not_fit_is_refused(bert: Any) -> None:
    for mask, found in (("masks", "is no input"), ("position_ids", "has the shape")):
        with pytest.raises(featx.RequestError, match=found):
            featx.create_feature_extractor(bert, {"encoder.layer.1": Feature(pool="avg", mask=mask)})


@pytest.mark.slow
def test_maps_and_tokens_of_images_know_no_mask() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.rand(2, 3, 64, 64)
    found = featx.create_feature_extractor(model, {"layer4": Feature(pool="avg")})(x)["layer4"]
    assert torch.equal(found, featx.create_feature_extractor(model, ["layer4"])(x)["layer4"].mean((2, 3)))
    with pytest.raises(featx.RequestError, match="no last token of a text"):
        featx.create_feature_extractor(model, {"layer4": Feature(pool="last")})


class OfTextAndImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.text, self.image = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Conv2d(3, 6, 4, stride=4)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return self.text(self.words(ids)) @ self.image(images).mean((2, 3))[:, :, None]


@pytest.mark.parametrize(("how", "place"), [("cls", 0), ("last", -1)])
def test_a_text_beside_an_image_has_a_first_and_a_last_token(how: Any, place: int) -> None:
    torch.manual_seed(0)
    model, inputs = OfTextAndImage().eval(), (torch.randint(9, (2, 5)), torch.rand(2, 3, 8, 8))
    extractor = featx.create_feature_extractor(model, {"text": Feature(pool=how)}, example_inputs=inputs)
    assert torch.equal(extractor(*inputs)["text"], model.text(model.words(inputs[0]))[:, place])


class OfTwoTexts(nn.Module):
    """As wide as the first text is long, so that the second one could be taken for it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.drop = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Dropout()
        self.second = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, document: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        document = self.first(self.words(document))
        return self.drop(self.second(self.words(query), document, document)[0])


@pytest.mark.parametrize("length", [6, 7], ids=["as long as wide", "longer"])
@pytest.mark.parametrize("how", ["avg", "last"])
def test_the_tokens_of_a_second_text_are_those_that_are_pooled(how: Any, length: int) -> None:
    torch.manual_seed(0)
    model, inputs = OfTwoTexts().eval(), (torch.randint(9, (2, length)), torch.randint(9, (2, 4)))
    extractor = featx.create_feature_extractor(model, {"drop": Feature(pool=how)}, example_inputs=inputs)
    values = model(*inputs)
    expected = values.mean(1) if how == "avg" else values[:, -1]
    assert torch.allclose(extractor(*inputs)["drop"], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("length", [32, 7], ids=["as long as wide", "other"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_decoder_is_pooled_over_its_own_tokens(length: int, is_padded: bool) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, vocab_size=100)
    model = transformers.T5Model(config).eval()
    extractor = featx.create_feature_extractor(model, {"decoder.final_layer_norm": Feature("x", pool="avg")})
    inputs = {"input_ids": torch.randint(5, 90, (2, length)), "decoder_input_ids": torch.randint(5, 90, (2, 4))}
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    if is_padded:
        inputs["decoder_attention_mask"] = mask
    states = model(**inputs).last_hidden_state
    expected = by_hand(states, mask if is_padded else torch.ones_like(mask), "avg")
    assert torch.allclose(extractor(**inputs)["x"], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "place"), [("cls", 0), ("last", -1)])
def test_a_decoder_of_speech_has_a_last_token(how: Any, place: int) -> None:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, vocab_size=100, max_source_positions=30,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperModel(config).eval()
    inputs = {"input_features": torch.rand(2, 8, 60), "decoder_input_ids": torch.randint(3, 90, (2, 5))}
    nodes = {"decoder.layer_norm": Feature("x", pool=how)}
    extractor = featx.create_feature_extractor(model, nodes, example_inputs=inputs)
    assert torch.equal(extractor(**inputs)["x"], model(**inputs).last_hidden_state[:, place])


@pytest.mark.slow
def test_it_is_pickled(bert: Any) -> None:
    extractor = featx.create_feature_extractor(bert, {"encoder.layer.1": Feature(pool="avg")})
    again = pickle.loads(pickle.dumps(extractor))
    for kwargs in ({"input_ids": IDS, "attention_mask": RIGHT}, {"input_ids": IDS}):
        assert torch.equal(again(**kwargs)["encoder.layer.1"], extractor(**kwargs)["encoder.layer.1"])


@pytest.mark.slow
@pytest.mark.parametrize("request_", [["output"], ["model.layers.0", "output"]], ids=["output", "state"])
def test_the_choices_of_the_example_hold_for_all_inputs(request_: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).eval()
    extractor = featx.create_feature_extractor(model, request_)
    for kwargs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": RIGHT}):
        found = extractor(**kwargs)["output"]
        assert list(found) == ["logits"]  # without a cache, as in the example that featx makes
        assert torch.equal(found.logits, model(**kwargs, use_cache=False).logits)


def _average(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@pytest.mark.slow
def test_tokens_of_a_decoder_are_pooled_by_its_own_mask() -> None:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=50, decoder_start_token_id=0
    )
    model = transformers.T5Model(config).eval()
    ids = torch.arange(18).view(2, 9)
    masks = torch.ones(2, 2, 9, dtype=torch.long)
    masks[0, 1, 5:] = masks[1, 0, 3:] = 0
    request: Any = {"decoder.final_layer_norm": [featx.Feature("pooled", pool="avg"), "tokens"]}
    extractor = featx.create_feature_extractor(model, request)
    both = {"input_ids": ids, "attention_mask": masks[0], "decoder_input_ids": ids}
    found = extractor(**both, decoder_attention_mask=masks[1])
    torch.testing.assert_close(found["pooled"], _average(found["tokens"], masks[1]))
    for length in (9, 4, 9):
        found = extractor(**{**both, "decoder_input_ids": ids[:, :length]})
        torch.testing.assert_close(found["pooled"], found["tokens"].mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [featx.Feature().mask, "attention_mask"], ids=["own", "named"])
def test_a_mask_of_another_shape_is_refused(mask: str) -> None:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    ids, padding = torch.arange(18).view(2, 9), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    padding[1, ..., 5:] = False
    feature = featx.Feature("pooled", pool="avg", mask=mask)
    with pytest.raises(featx.RequestError, match=r"one value for each token.*'attention_mask' has the shape"):
        featx.create_feature_extractor(
            model, {"encoder.layer.0": feature}, example_inputs={"input_ids": ids, "attention_mask": padding}
        )


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 4, stride=4)

    def forward(self, images: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
        return (self.stem(images) * scales[0]).mean()


def test_a_number_beside_a_pooled_map_where_an_input_is_a_list() -> None:
    torch.manual_seed(0)
    model, inputs = WithLoss().eval(), (torch.rand(2, 3, 8, 8), [torch.rand(1)])
    nodes = {"stem": Feature("map", pool="avg"), "output": "loss"}
    found = featx.create_feature_extractor(model, nodes, example_inputs=inputs)(*inputs)
    assert torch.equal(found["map"], model.stem(inputs[0]).mean((2, 3)))
    assert torch.equal(found["loss"], model(*inputs))
