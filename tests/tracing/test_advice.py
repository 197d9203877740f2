"""What messages of a trace say to do, where a way out is known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

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


def test_list_that_forward_fills() -> None:
    class FusesPathways(nn.Module):
        """Writes into the list that it is given, as SlowFast of pytorchvideo does."""

        def __init__(self) -> None:
            super().__init__()
            self.pathways = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: list[Tensor]) -> Tensor:
            for number, pathway in enumerate(self.pathways):
                x[number] = pathway(x[number])
            return x[0] + x[1]

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = FusesPathways()

        def forward(self, slow: Tensor, fast: Tensor) -> Tensor:
            return self.model([slow, fast])

    slow, fast = torch.rand(2, 4), torch.rand(2, 4)
    with pytest.raises(featx.TraceError, match=r"whose forward makes the list .*self\.model\(\[slow, fast\]\)"):
        featx.create_feature_extractor(FusesPathways(), ["output"], example_inputs=([slow, fast],))
    model = Wrapped().eval()
    extractor = featx.create_feature_extractor(model, ["model.pathways.0", "output"], example_inputs=(slow, fast))
    assert torch.equal(extractor(fast, slow)["output"], model(fast, slow))


def test_hooks_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "operations.py"
    path.write_text(
        "def send(x):\n    try:\n        return x.to('cpu')\n    except TypeError:\n        return x.to('cpu', 1)\n"
        "    except AssertionError:\n        return x.to('cpu:0')"
    )
    spec = importlib.util.spec_from_file_location("accelerate.operations", path)
    assert spec is not None
    assert spec.loader is not None
    library: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "accelerate.operations", library)
    spec.loader.exec_module(library)

    class Offloaded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return library.send(x) * 2

    with pytest.raises(featx.TraceError, match=r"To go on, .*remove_hook_from_submodules\(model\)"):
        featx.trace(Offloaded(), torch.rand(2))
