"""Models that do not run with the likeliest inputs for their first layer: others are found without being asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx import Feature


class LeNet(nn.Module):
    """For digits of 32 pixels, or for others by `places`: how many are left before the first linear layer."""

    def __init__(self, places: int = 5) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * places**2, 20), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.conv1(x).relu(), 2)
        x = functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


class SmallViT(nn.Module):
    """For 64 pixels: a class token, and sixteen patches with embeddings of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 16, 16), nn.LayerNorm(8)
        self.cls, self.pos_embed = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.block = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.norm(self.block(x))[:, 0]


class Sequences(nn.Module):
    """Takes vectors in sequences; its layers would take single ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, length, _ = x.shape
        return self.encoder(self.embed(x))[:, length - 1]


class Tokens(nn.Module):
    """Has positions for eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.pos = nn.Parameter(torch.randn(8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) + self.pos[: tokens.shape[1]])


class Signals(nn.Module):
    """For 1000 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 4, 9, 4), nn.Linear(4 * 248, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).flatten(1))


CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], Callable[[int], torch.Tensor]]] = {
    "digits of 32": (LeNet, "conv2", (16, 10, 10), lambda n: torch.rand(n, 1, 32, 32)),
    "digits of 28": (lambda: LeNet(4), "fc1", (20,), lambda n: torch.rand(n, 1, 28, 28)),
    "images of 64": (lambda: LeNet(13), "fc1", (20,), lambda n: torch.rand(n, 1, 64, 64)),
    "positions": (SmallViT, "block", (17, 8), lambda n: torch.rand(n, 3, 64, 64)),
    "sequences": (Sequences, "encoder", (16, 8), lambda n: torch.rand(n, 16, 6)),
    "tokens": (Tokens, "embed", (8, 8), lambda n: torch.randint(0, 50, (n, 8))),
    "signals": (Signals, "conv", (4, 248), lambda n: torch.rand(n, 1, 1000)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", CASES)
def test_inputs_with_which_the_model_runs_are_found(kind: str, training: bool) -> None:
    make, name, shape, inputs = CASES[kind]
    torch.manual_seed(0)
    model = make().train(training)
    extractor = featx.create_feature_extractor(model, [name, "output"])
    assert extractor.feature_info[name].shape == (2, *shape)
    x = inputs(3)
    found = dict[str, torch.Tensor]()
    model.get_submodule(name).register_forward_hook(lambda _, __, result: found.__setitem__(name, result))
    torch.manual_seed(1)
    found["output"] = model(x)
    torch.manual_seed(1)
    assert all(torch.equal(value, found[key]) for key, value in extractor(x).items())


@pytest.mark.parametrize("kind", CASES)
def test_a_value_ahead_of_the_failure_is_of_such_inputs_too(kind: str) -> None:
    make, name, shape, inputs = CASES[kind]
    model = make().eval()
    extractor = featx.create_feature_extractor(model, [name])
    assert extractor.feature_info[name].shape == (2, *shape)
    assert extractor(inputs(3))[name].shape == (3, *shape)


def test_tokens_of_such_a_model_are_pooled_without_its_class_token() -> None:
    model, x = SmallViT().eval(), torch.rand(2, 3, 64, 64)
    features = [Feature("mean", pool="avg"), Feature("cls", pool="cls"), Feature("map", layout="NCHW"), "tokens"]
    found = featx.create_feature_extractor(model, {"block": features})(x)
    assert torch.allclose(found["mean"], found["tokens"][:, 1:].mean(1))
    assert torch.equal(found["cls"], found["tokens"][:, 0])
    assert found["map"].shape == (2, 8, 4, 4)


def test_patches_that_einops_cuts_tell_the_size() -> None:
    layers = pytest.importorskip("einops.layers.torch")
    cut = layers.Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=8, p2=8)
    model = nn.Sequential(cut, nn.LayerNorm(192), nn.Linear(192, 4))
    model.register_parameter("pos_embedding", nn.Parameter(torch.zeros(1, 17, 4)))
    extractor = featx.create_feature_extractor(model.eval(), ["2"])
    assert extractor.feature_info["2"].shape == (2, 16, 4)
    assert extractor(torch.rand(3, 3, 32, 40))["2"].shape == (3, 20, 4)


class RelativePositions(nn.Module):
    """Begins with patches, and has a table of relative positions, which says nothing of the size of images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 4, 4, 4)
        self.position_bias_table = self.relative_position = nn.Parameter(torch.zeros(169, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patch(x)
        return y.unflatten(2, (-1, 7)).mean() + self.relative_position.sum()


def test_relative_positions_say_nothing_of_the_size() -> None:
    extractor = featx.create_feature_extractor(RelativePositions().eval(), ["patch", "output"])
    assert extractor.feature_info["patch"].shape == (2, 4, 56, 56)


class AsksForValues(nn.Module):
    """Runs with the first guess, and asks for values after what is requested."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.conv(x).mean((2, 3)))
        return y if y.sum().item() > 0 else -y


@pytest.mark.parametrize("names", [["conv"], ["conv", "output"]], ids=" ".join)
def test_inputs_with_which_the_model_runs_are_kept(names: list[str]) -> None:
    extractor = featx.create_feature_extractor(AsksForValues().eval(), names)
    assert extractor.feature_info["conv"].shape == (2, 4, 222, 222)
