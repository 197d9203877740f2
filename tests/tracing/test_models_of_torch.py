"""Models that torch itself has wrapped or made: scripted and exported submodules, DistributedDataParallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 3, 1), child, nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)))


def body() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["traced", "scripted", "frozen"])
def test_images_pass_through_a_module_of_torchscript(kind: str) -> None:
    jit: Any = torch.jit
    child = jit.trace(body(), X) if kind == "traced" else jit.script(body())
    model = Net(jit.freeze(child) if kind == "frozen" else child).eval()
    extractor = featx.create_feature_extractor(model, ["body", "head"], example_inputs=X)
    x = torch.rand(1, 3, 12, 10)
    assert torch.equal(extractor(x)["head"], model(x))
    assert len(featx.nodes(model, example_inputs=X)) > 0


def test_program_of_torch_export_has_one_mode_and_says_so() -> None:
    program = torch.export.export(body(), (X,)).module()
    for model in (program, Net(program)):
        with pytest.raises(featx.TraceError, match=r"torch\.export, make the extractor of the model"):
            featx.create_feature_extractor(model, ["output"], example_inputs=X)


def test_model_in_distributed_data_parallel_says_what_to_trace(tmp_path: Path) -> None:
    if torch.distributed.is_initialized():
        pytest.fail("another test has left a process group")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Net(body()))
        with pytest.raises(featx.TraceError, match=r"`model\.module`"):
            featx.create_feature_extractor(model, ["head"], example_inputs=X)
        extractor = featx.create_feature_extractor(model.module, ["head"], example_inputs=X)
        assert torch.equal(extractor(X)["head"], model.module(X))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize("names", [["output"], ["layers.0.linear1"]])
def test_encoder_that_packs_padded_batches_is_refused(names: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    inputs = {"src": torch.rand(2, 5, 8), "src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}
    with torch.no_grad(), pytest.raises(featx.TraceError, match=r"model\.use_nested_tensor = False"):
        featx.create_feature_extractor(model, names, example_inputs=inputs)
    model.use_nested_tensor = False
    with torch.no_grad():
        extractor = featx.create_feature_extractor(model, names, example_inputs=inputs)
        if names == ["output"]:  # its layers use other kernels than what is looked into
            torch.testing.assert_close(extractor(**inputs)["output"], model(**inputs))
