"""Dicts as inputs: a batch holds more than the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

IMAGE = torch.rand(2, 4)


class Reads(nn.Module):
    """Reads items of a batch by constant keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.first(batch["image"]) * batch.get("scale", 1.0)
        return self.second(x) if "mask" not in batch else self.second(x) * batch["mask"]


class PassesOn(Reads):
    """Lets a function see the whole batch."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.second(self.first(batch["image"])) * len(batch)


@pytest.fixture(params=[None, True], ids=["plain", "adaptive"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    def extractor(model: nn.Module, example: Any) -> Any:
        return featx.create_feature_extractor(
            model, ["first", "output"], example_inputs=example, adaptive=request.param
        )

    return extractor


@pytest.mark.parametrize(
    "batch",
    [
        {"image": IMAGE * 2, "path": ["c", "d"], "label": 3},
        {"path": ["a", "b"], "image": IMAGE[:1]},
        {"image": IMAGE, "path": ["a", "b"], "label": torch.ones(2), "more": object()},
        {"image": IMAGE},
    ],
    ids=["other values", "other order", "more", "fewer"],
)
@pytest.mark.parametrize("as_input", [lambda batch: batch, lambda batch: (batch,)], ids=["dict", "tuple"])
def test_what_forward_does_not_read_may_be_anything(
    make: Callable[..., Any], batch: dict[str, Any], as_input: Callable[[Any], Any]
) -> None:
    model = Reads().eval()
    extractor = make(model, as_input({"image": IMAGE, "path": ["a", "b"], "label": 1}))
    found = extractor(batch)
    assert torch.equal(found["output"], model(batch))
    assert torch.equal(found["first"], model.first(batch["image"]))
    assert len(getattr(extractor, "extractors", [0])) == 1


def test_reading_items_for_a_check_writes_and_draws_nothing() -> None:
    extractor = featx.create_feature_extractor(Reads().eval(), ["output"], example_inputs=({"image": IMAGE},))
    (read,) = (node for node in extractor.graph.nodes if node.name == "read_items")
    assert not read.is_impure()


def test_what_forward_reads_is_checked() -> None:
    extractor = featx.create_feature_extractor(Reads().eval(), ["output"], example_inputs=({"image": IMAGE},))
    for more in ({"scale": 2.0}, {"mask": torch.ones(2, 4)}):
        with pytest.raises(featx.SpecializationError, match="the form of input 'batch'"):
            extractor({"image": IMAGE, **more})
    with pytest.raises(featx.SpecializationError, match="the form of input 'batch'"):
        extractor({"path": ["a"]})


def test_batch_that_is_passed_on_is_checked_whole() -> None:
    model = PassesOn().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=({"image": IMAGE, "path": "a"},))
    batch = {"image": IMAGE * 2, "path": "a"}
    assert torch.equal(extractor(batch)["output"], model(batch))
    with pytest.raises(featx.SpecializationError, match="the form of input 'batch'"):
        extractor({"image": IMAGE})


def test_hook_of_the_model_may_read_all_of_a_batch() -> None:
    model = Reads().eval()
    model.register_forward_pre_hook(lambda module, args: ({"image": args[0]["image"] * len(args[0])},))
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=({"image": IMAGE, "path": "a"},))
    with pytest.raises(featx.SpecializationError, match="the form of input 'batch'"):
        extractor({"image": IMAGE})


@pytest.mark.slow
def test_graph_of_a_batch_is_exported_and_stands_alone(tmp_path: Any) -> None:
    model, batch = Reads().eval(), {"image": IMAGE, "path": "a"}
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(batch,)).eval()
    expected = model(batch)
    assert torch.equal(torch.compile(extractor, backend="eager", fullgraph=True)(batch)["output"], expected)
    exported = torch.export.export(extractor, ({"image": IMAGE},)).module()
    assert torch.equal(exported({"image": IMAGE})["output"], expected)
    extractor.to_folder(tmp_path / "code", "Batch")
    (code,) = (tmp_path / "code").glob("*.py")
    assert "import featx" not in code.read_text()
    namespace: dict[str, Any] = {"__file__": str(code), "__name__": "code"}
    exec(compile(code.read_text(), str(code), "exec"), namespace)
    alone = namespace["Batch"]()
    assert torch.equal(alone({"image": IMAGE, "more": 1})["output"], expected)
    with pytest.raises(RuntimeError, match="the form of input 'batch'"):
        alone({"mask": IMAGE, "image": IMAGE})
