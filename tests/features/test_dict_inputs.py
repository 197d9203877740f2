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


def test_models_that_pass_inputs_on_take_what_their_child_takes() -> None:
    class PassesAll(nn.Module):
        def __init__(self, child: nn.Module) -> None:
            super().__init__()
            self.child = child

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.child(*args, **kwargs)

    convolution = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    for model, path in (
        (nn.DataParallel(convolution), "module.0"),
        (PassesAll(PassesAll(convolution)), "child.child.0"),
    ):
        extractor = featx.create_feature_extractor(model.eval(), [path])
        x = torch.rand(1, 3, 8, 8)
        assert torch.equal(extractor(x)[path], convolution[0](x))


def test_model_whose_inputs_are_not_known_asks_for_an_example() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, first: list[torch.Tensor], second: torch.Tensor) -> torch.Tensor:
            for each in first:
                second = second + self.linear(each)
            return second

    for call in (featx.get_graph_node_names, featx.nodes, lambda model: featx.create_feature_extractor(model, ["add"])):
        with pytest.raises(featx.TraceError, match="not known which inputs Several takes; give example_inputs"):
            call(Several())
    given = ([IMAGE], IMAGE)
    assert torch.equal(
        featx.create_feature_extractor(model := Several(), ["add"], example_inputs=given)(*given)["add"], model(*given)
    )


def test_adaptive_extractor_keeps_the_graphs_that_ran_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featx.features.adaptive._MOST", 3)
    model = PassesOn().eval()

    def batch(path: str) -> dict[str, Any]:
        return {"image": IMAGE, "path": path}

    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(batch("a"),), adaptive=True)
    made = []
    for path in "bcbdbeba":
        before = extractor.extractors
        assert torch.equal(extractor(batch(path))["output"], model(batch(path)))
        assert len(extractor.extractors) <= 3
        made.append(extractor.extractors[-1] not in before)
    assert extractor.extractors[0].meta["example"].args[0]["path"] == "a"
    assert "".join("bcbdbeba"[place] for place, is_new in enumerate(made) if is_new) == "bcde"


def test_decision_by_a_random_number_says_that_it_is_drawn() -> None:
    class DropsLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) if not self.training or torch.rand(1).item() > 0.5 else x
            return x

    torch.manual_seed(0)
    extractor = featx.create_feature_extractor(
        DropsLayers(), ["output"], example_inputs=IMAGE, suppress_diff_warning=True
    ).train()
    with pytest.raises(featx.SpecializationError, match="The model draws this at random") as caught:  # noqa: PT012
        for _ in range(20):
            extractor(IMAGE)
    assert "adaptive=True" not in str(caught.value)
