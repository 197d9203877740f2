"""Extractors under DistributedDataParallel, fully_shard and prepare_fx; see docs/distributed.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.fx
from torch import Tensor, distributed, nn

import featx
from featx.errors import ArgumentTypeError

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + x


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def check_step(extractor: nn.Module, expected: Tensor) -> None:
    value = extractor(X)["1"]
    assert torch.equal(value, expected)
    value.sum().backward()
    assert all(parameter.grad is not None for parameter in extractor.parameters())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("names", [["0.relu", "1"], ["0", "1"]], ids=["opened", "whole"])
def test_extractor_runs_and_learns_under_data_parallel(names: list[str]) -> None:
    whole = model()
    extractor = featx.create_feature_extractor(whole, names, example_inputs=X)
    check_step(nn.parallel.DistributedDataParallel(extractor), whole[:2](X))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("names", [["0.relu", "1"], ["0", "1"]], ids=["opened", "whole"])
def test_extractor_runs_and_learns_when_it_is_sharded(names: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = model()
    expected = whole[:2](X)
    extractor = featx.create_feature_extractor(whole, names, example_inputs=X)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(extractor.get_submodule("1"), mesh=mesh)
    fully_shard(extractor, mesh=mesh)
    check_step(extractor, expected)


def test_torch_fx_and_prepare_fx_say_that_an_extractor_is_to_be_converted() -> None:
    extractor = featx.create_feature_extractor(model(), ["1"], example_inputs=X).eval()
    with pytest.raises(ArgumentTypeError, match="to_torch_fx"):
        torch.fx.symbolic_trace(extractor)
    converted = torch.fx.symbolic_trace(featx.to_torch_fx(extractor))
    assert torch.equal(converted(X)["1"], extractor(X)["1"])
    assert torch.equal(type(extractor).forward(extractor, X)["1"], extractor(X)["1"])
