"""What forward hooks leave for forward that is no tensor yet: lists that they fill, attributes that they set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx


class Recorder(nn.Module):
    """Returns what hooks have recorded in this call, as the Recorder of vit-pytorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.recordings: list[torch.Tensor] = []
        for layer in self.net:
            layer.register_forward_hook(self.record)

    def record(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.recordings.append(output.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recordings.clear()
        y = self.net(x)
        return self.of(y)

    def of(self, y: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.recordings, 1) if len(self.recordings) > 0 else y


class CountsRecords(Recorder):
    def of(self, y: torch.Tensor) -> torch.Tensor:
        return y * len(self.recordings)


class SumsRecords(Recorder):
    def of(self, y: torch.Tensor) -> torch.Tensor:
        return sum(self.recordings, y)


class SetsNumber(Recorder):
    def record(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.length = output.shape[0]

    def of(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.length


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.scale is None else self.linear(x) * self.scale


class ConditionsAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.block = nn.Linear(4, 4), Conditioned()
        self.net.register_forward_hook(lambda module, args, output: setattr(self.block, "scale", output.sigmoid()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.net(x)
        return self.block(x)


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, names) for kind in (Recorder, CountsRecords, SumsRecords, SetsNumber)
          for names in (["output"], ["net.1", "output"])),
        *((ConditionsAnother, names) for names in (["output"], ["block"], ["block.linear", "output"])),
    ],
)  # fmt: skip
def test_what_hooks_leave_is_that_of_this_call_or_refused(
    kind: type[nn.Module], names: list[str], has_run: bool
) -> None:
    model, x = kind().eval(), torch.rand(2, 4)
    if has_run:
        model(torch.rand(3, 4))
    try:
        extractor = featx.create_feature_extractor(model, names, example_inputs=x)
    except featx.TraceError:
        return
    assert torch.equal(extractor(x)[names[-1]], model(x))


def test_module_in_which_hooks_count_is_looked_into() -> None:
    model = nn.Sequential(nn.Linear(4, 4), CountsRecords(), nn.ReLU()).eval()
    graph_module = featx.trace(model, torch.rand(2, 4))
    assert not graph_module.graph.find_nodes(op="call_module", target="1")
    x = torch.rand(3, 4)
    assert torch.equal(graph_module(x), model(x))


def test_record_that_forward_only_clears_is_no_reason_to_refuse() -> None:
    class KeepsForLater(Recorder):
        def of(self, y: torch.Tensor) -> torch.Tensor:
            return y

    model, x = KeepsForLater().eval(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["net.1", "output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))
