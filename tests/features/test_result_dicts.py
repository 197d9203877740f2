"""Models whose modules add their results to the dict that they are given, as those of sentence-transformers do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import featx

Features = dict[str, torch.Tensor]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, 6), nn.Linear(6, 6)

    def forward(self, features: Features) -> Features:
        features["words"] = self.layer(self.table(features["input_ids"]))
        return features


class Mean(nn.Module):
    def forward(self, features: Features) -> Features:
        mask = features["attention_mask"].unsqueeze(-1).float()
        features["mean"] = (features["words"] * mask).sum(1) / mask.sum(1)
        return features


class Scaled(nn.Module):
    def forward(self, features: Features) -> Features:
        features.update({"mean": nn.functional.normalize(features["mean"])})
        return features


def batch(*shape: int) -> Features:
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, 2:] = 0
    return {"input_ids": torch.randint(0, 20, shape), "attention_mask": mask}


@pytest.mark.parametrize("name", ["0.layer", "0.table", "1", "output"])
def test_features_are_those_of_hooks_and_the_dict_of_the_caller_stays(name: str) -> None:
    model = nn.Sequential(Words(), Mean(), Scaled())
    extractor = featx.create_feature_extractor(model, [name], example_inputs=(batch(2, 5),))
    for given in (batch(2, 5), batch(3, 7)):
        before, seen = dict(given), list[Any]()
        hooked = copy.deepcopy(model)
        module = hooked if name == "output" else hooked.get_submodule(name)
        module.register_forward_hook(lambda module, args, output, seen=seen: seen.append(copy.copy(output)))
        expected = hooked(dict(given)) if name == "output" else (hooked(dict(given)), seen[0])[1]
        found = extractor(given)[name]
        assert given == before
        pairs = (
            [(found, expected)] if isinstance(found, torch.Tensor) else [(found[key], expected[key]) for key in found]
        )
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


class Asks(nn.Module):
    """Computes from what the last call has left in the dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, features: Features) -> torch.Tensor:
        x = features["x"]
        if "last" in features:
            x = x + features["last"]
        features["last"] = self.layer(x)
        return features["last"]


class Gets(Asks):
    def forward(self, features: Features) -> torch.Tensor:
        x = self.layer(features["x"] + features.get("last", torch.zeros(6)))
        features["last"] = x
        return x


class Overwrites(Asks):
    def forward(self, features: Features) -> torch.Tensor:
        features["x"] = self.layer(features["x"])
        return features["x"]


@pytest.mark.parametrize("kind", [Asks, Gets, Overwrites])
def test_dicts_that_carry_state_are_refused(kind: type[Asks]) -> None:
    with pytest.raises(featx.TraceError, match="a dict"):
        featx.create_feature_extractor(kind(), ["layer"], example_inputs=({"x": torch.rand(2, 6)},))
