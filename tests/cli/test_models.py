"""Models that are named on the command line: their weights come from the network only where they are asked for."""

from __future__ import annotations

from urllib.error import URLError

import pytest
import torch

from featx.cli.errors import UserError
from featx.cli.models import load_model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)


@pytest.mark.usefixtures("no_network")
def test_a_detector_is_made_without_the_weights_of_its_backbone() -> None:
    with torch.device("meta"):
        model = load_model(
            "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", pretrained=False, weights=None, seed=None
        )
    assert "backbone.fpn" in dict(model.named_modules())


@pytest.mark.usefixtures("no_network")
def test_weights_that_cannot_be_had_are_named() -> None:
    with pytest.raises(UserError, match=r"the weights of 'resnet18' cannot be loaded: URLError: .*no route to host"):
        load_model("torchvision:resnet18", pretrained=True, weights=None, seed=None)
