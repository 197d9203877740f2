"""Every pass on real models, traced by both tracers, against the eager model: bit for bit, or to 1e-9 when fused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import GraphModule, passes

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

pytestmark = pytest.mark.sweep

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: torchvision.models.resnet18(weights=None), 32),
    "mobilenet_v3_small": (lambda: torchvision.models.mobilenet_v3_small(weights=None), 32),
    "vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3), 32),
    "swin_tiny": (lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=28, depths=(2, 2)), 28),
}
CASES = [
    (name, training, tracer) for name in MODELS for training in (False, True) for tracer in ("symbolic", "example")
]


class Case:
    """A model in float64, its trace, and what the model makes of one input with one seed."""

    def __init__(self, name: str, training: bool, tracer: str) -> None:
        build, size = MODELS[name]
        torch.manual_seed(0)
        self.name, self.model = name, build().double().train(training)
        for part in self.model.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                assert part.running_mean is not None
                assert part.running_var is not None
                part.running_mean.uniform_(-1, 1)
                part.running_var.uniform_(0.5, 2)
        self.x = torch.rand(2, 3, size, size, dtype=torch.float64)
        traced = featx.symbolic_trace(self.model) if tracer == "symbolic" else featx.trace(self.model, self.x)
        self._traced = traced
        self.expected = self.run(self.model)

    @property
    def gm(self) -> GraphModule:
        """A copy of the trace, which shares the weights of the model."""
        return copy.copy(self._traced)

    def run(self, module: nn.Module) -> Any:
        torch.manual_seed(1)
        with torch.no_grad():
            return copy.deepcopy(module)(self.x.clone())

    def compare(self, module: GraphModule, tolerance: float = 0.0) -> None:
        module.graph.lint()
        torch.testing.assert_close(self.run(module), self.expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'train' if case[1] else 'eval'}-{case[2]}")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def calls(gm: GraphModule) -> int:
    return sum(node.op.startswith("call") and not node.meta.get("is_guard") for node in gm.graph.nodes)


# By model: whether dead code, common subexpressions, and constants are there to be found (in the eager model's code).
FINDS = {
    "resnet18": (False, False, False),
    "mobilenet_v3_small": (False, False, False),
    "vit_tiny": (True, False, False),
    "swin_tiny": (True, True, True),
}


def test_edits(case: Case) -> None:
    changed: list[bool] = []
    for change in (
        passes.eliminate_dead_code,
        passes.eliminate_common_subexpressions,
        lambda gm: passes.fold_constants(gm, include_trainable=True),
    ):
        gm = case.gm
        before = calls(gm)
        changed.append(change(gm))
        assert (calls(gm) < before) is changed[-1]
        case.compare(gm)
    assert tuple(changed) == FINDS[case.name]


def test_normalized_arguments(case: Case) -> None:
    gm = case.gm
    assert passes.normalize_arguments(gm)
    assert all(node.kwargs and not node.args for node in gm.graph.find_nodes(op="call_module"))
    case.compare(gm)


def test_dropout(case: Case) -> None:
    gm = case.gm
    modules = [node for node in gm.graph.nodes if node.op == "call_module"]
    count = sum(isinstance(gm.get_submodule(node.target), nn.Dropout) for node in modules)
    assert passes.remove_dropout(gm) is (count > 0 and not gm.training)
    left = sum(isinstance(gm.get_submodule(node.target), nn.Dropout) for node in modules if not node.is_erased)
    assert left == (count if gm.training else 0)
    case.compare(gm)


def test_fusion(case: Case) -> None:
    gm = case.gm
    if gm.training:
        with pytest.raises(featx.PassError):
            passes.fuse_conv_bn(gm)
        return
    has_norms = any(isinstance(part, nn.BatchNorm2d) for part in case.model.modules())
    assert passes.fuse_conv_bn(gm) is has_norms
    assert not any(isinstance(part, nn.BatchNorm2d) for part in gm.modules())
    case.compare(gm, 1e-9)
    # The model keeps its norms and what it computes.
    assert any(isinstance(part, nn.BatchNorm2d) for part in case.model.modules()) is has_norms
    assert torch.equal(case.run(case.model), case.expected)


def test_stages(case: Case) -> None:
    names = [node.name for node in case.gm.graph.nodes if node.op.startswith("call")]
    stages = passes.split_at(case.gm, [names[len(names) // 3], names[2 * len(names) // 3]])
    assert [name for name in dict(stages.named_children()) if name.startswith("submod")] == [
        "submod_0",
        "submod_1",
        "submod_2",
    ]
    assert sum(calls(stages.get_submodule(f"submod_{number}")) for number in range(3)) >= calls(case.gm)  # type: ignore[arg-type]
    case.compare(stages)


def test_partition(case: Case) -> None:
    gm = case.gm
    parts = passes.partition(gm, lambda node: node.op == "call_module" or node.target in ("add", "view", "reshape"))
    assert not parts.graph.find_nodes(op="call_module", target="head")
    outer = [node for node in parts.graph.nodes if node.op == "call_module"]
    assert outer
    assert all(isinstance(parts.get_submodule(node.target), GraphModule) for node in outer)
    case.compare(parts)


def test_whole_and_halves_are_extracted(case: Case) -> None:
    gm = case.gm
    result = gm.graph.output_node().args[0]
    whole = passes.extract_subgraph(gm, "x", result)
    case.compare(whole)
    middle = {"resnet18": "layer2", "mobilenet_v3_small": "features.6", "vit_tiny": "blocks.1", "swin_tiny": "layers.0"}
    second = passes.extract_subgraph(gm, [middle[case.name]], result)
    if gm.training:
        return  # the first half draws and writes statistics; hooks on a model in train mode see another state
    seen: list[torch.Tensor] = []
    model = copy.deepcopy(case.model)
    model.get_submodule(middle[case.name]).register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
    with torch.no_grad():
        expected = model(case.x)
        assert torch.equal(second(*seen), expected)
    assert calls(second) < calls(gm)
    assert torch.equal(case.run(passes.extract_subgraph(gm, "x", middle[case.name])), seen[0])
