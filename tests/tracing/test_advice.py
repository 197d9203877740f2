"""What messages of a trace say to do, where a way out is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import featx


class AddsResults(nn.Module):
    """Adds what it computes to the dict that it is given, as sentence-transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["tokens"] = self.layer(self.words(features["ids"]))
        features.update({"embedding": features["tokens"].mean(1)})
        return features


def test_a_dict_to_which_an_earlier_call_has_added_its_results() -> None:
    model, ids = AddsResults().eval(), torch.randint(0, 20, (2, 5))
    used = {"ids": ids}
    expected = model(used)["tokens"].clone()
    advice = r"give a dict without what an earlier call of the model has added to it: 'tokens', 'embedding'"
    with pytest.raises(featx.TraceError, match=advice):
        featx.create_feature_extractor(model, ["layer"], example_inputs=(used,))
    extractor = featx.create_feature_extractor(model, ["layer"], example_inputs=({"ids": ids},))
    assert torch.equal(extractor({"ids": ids})["layer"], expected)


@pytest.mark.slow
def test_augmentation_of_speech_models_that_draws_from_numpy() -> None:
    transformers = pytest.importorskip("transformers")
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**sizes, **layers, **positions)).train()
    signal = torch.rand(2, 1600)
    with pytest.raises(featx.TraceError, match=r"config.apply_spec_augment = False"):
        featx.create_feature_extractor(model, ["encoder.layers.0"], example_inputs=signal)(signal)
    model.config.apply_spec_augment = False
    extractor = featx.create_feature_extractor(model, ["encoder.layers.0"], example_inputs=signal)
    assert extractor(signal)["encoder.layers.0"].shape[2] == 32
