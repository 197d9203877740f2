"""State that forward writes under a condition after the requested value, in whatever way it does that."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import detection

import featx

SOURCE = """
import torch
from torch import nn
from torch.nn import functional


def average(model):
    model.scale.add_(1)


def maybe(model, z):
    if z.abs().mean() > 50:
        model.book.expire()


def maybe_by_second(z, model):
    if z.abs().mean() > 50:
        model.book.expire()


def maybe_part(z, book=None):
    if z.abs().mean() > 50:
        book.expire()


def through(z, *others):
    maybe_part(z, *others)


def ends(boxes, others):
    if others.sum() > 50:
        boxes = boxes.to(torch.float64)
    return boxes


class Helper:
    def fix(self, buffer):
        buffer.add_(1)

    def note(self, value):
        pass


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(6))

    def forward(self, x):
        return x * self.table

    @torch.no_grad()
    def expire(self):
        self.table.add_(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.book, self.books = Codebook(), nn.ModuleList([Codebook()])
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))
        self.factor, self.counts, self.helper = 1.0, {"n": 1.0}, Helper()

    def fix(self, buffer):
        buffer.add_(1)

    def forward(self, x):
        y = self.books[0](self.book(x)) * self.scale * self.factor * self.counts["n"]
        y = self.before(y)
        z = self.after(y)
        CALL
        if z.abs().mean() > 50:
            STATEMENT
        return z
"""
# What follows a condition of which the body ends the call.
RETURNS = "pass\n        if z.abs().mean() <= 50:\n            return z\n        self.book.expire()"
WRITES = [
    "self.book.expire()",
    "self.books[0].table.add_(1)",
    "self.books[-1].expire()",
    "average(self)",
    'self.book.load_state_dict({"table": torch.ones(6) * 2})',
    'self._buffers["scale"].add_(1)',
    'vars(self)["_buffers"]["scale"].add_(1)',
    "self.factor = 5.0",
    'self.counts["n"] = 3.0',
    "self.scale.add_(1)",
    '[each.expire() for each in self.modules() if hasattr(each, "expire")]',
    "for each in self.books: each.expire()",
    "self.apply(lambda each: each.expire() if isinstance(each, Codebook) else None)",
    "functional.batch_norm(y, self.scale, self.scale.clone(), training=True)",
    "Helper().fix(self.scale)",
    "self.helper.fix(self.scale)",
    "list(map(self.fix, [self.scale]))",
    RETURNS,
]
# What is called in any case, and decides by itself.
CALLS = [
    "maybe(self, z)",
    "maybe_by_second(z, self)",
    "maybe_by_second(z=z, model=self)",
    "maybe_part(z, self.book)",
    "maybe_part(z, book=self.books[0])",
    "through(z, self.book)",
    "run = maybe; run(self, z)",
    "for each in self.books: maybe_part(z, each)",
    # `else` of a loop is not in that loop: its `break` leaves the one around it.
    "while True:\n            for row in z: pass\n            else:\n                if z.abs().mean() <= 50: break\n"
    "            self.book.expire()\n            break",
]
# Functions of which the first parameter is no module; what leaves a loop leaves nothing around it.
HARMLESS_CALLS = [
    "z = ends(z, z * 2)",
    "for row in z.unbind():\n            if row.sum() > 1e9: break\n        self.helper.note(z)",
]
HARMLESS = ["z = z * 2", "z = self.after(z)", "z = z.relu()", "z = self.book(z)", "z = z + self.scale.mean()"]


def made(statement: str, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str = "pass") -> nn.Module:
    (folder / "written_model.py").write_text(SOURCE.replace("STATEMENT", statement).replace("CALL", call))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "written_model", raising=False)
    torch.manual_seed(0)
    return importlib.import_module("written_model").Model().eval()


@pytest.mark.parametrize("adaptive", [False, None])
@pytest.mark.parametrize(
    ("statement", "call"), [*((each, "pass") for each in WRITES), *(("pass", each) for each in CALLS)]
)
def test_no_value_is_that_of_a_state_which_the_model_has_changed(
    statement: str, call: str, adaptive: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(statement, tmp_path, monkeypatch, call)
    twin, found = copy.deepcopy(model), list[torch.Tensor]()
    twin.before.register_forward_hook(lambda module, args, result: found.append(result.clone()))
    extractor = featx.create_feature_extractor(model, ["before"], example_inputs=torch.rand(2, 6), adaptive=adaptive)
    x = torch.rand(2, 6)
    twin(x)
    assert torch.equal(extractor(x)["before"], found[-1])
    try:
        for each in (x * 1e4, x):
            twin(each)
            assert torch.equal(extractor(each)["before"], found[-1])
    except featx.TraceError:
        assert len(found) == 2  # at the input for which the model writes
    else:
        assert adaptive is None


@pytest.mark.parametrize(
    ("statement", "call"), [*((each, "pass") for each in HARMLESS), *(("pass", each) for each in HARMLESS_CALLS)]
)
def test_what_follows_is_left_out_where_nothing_is_written(
    statement: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(statement, tmp_path, monkeypatch, call)
    extractor = featx.create_feature_extractor(model, ["before"], example_inputs=torch.rand(2, 6))
    assert "after" not in extractor.code
    x = torch.rand(2, 6) * 1e4
    found: list[torch.Tensor] = []
    model.before.register_forward_hook(lambda module, args, result: found.append(result))
    model(x)
    assert torch.equal(extractor(x)["before"], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"])
def test_detection_is_left_out_behind_the_features_of_its_backbone(name: str) -> None:
    is_ssd = name.startswith("ssd")
    sizes = {} if is_ssd else {"min_size": 96, "max_size": 128}
    model = getattr(detection, name)(weights=None, weights_backbone=None, **sizes).eval()
    layer = "backbone.features.0.0" if is_ssd else "backbone.body.layer1"
    extractor = featx.create_feature_extractor(model, [layer], suppress_diff_warning=True).eval()
    assert len(extractor.graph.nodes) < 40
    x, found = [torch.rand(3, 90, 120)], list[torch.Tensor]()
    model.get_submodule(layer).register_forward_hook(lambda module, args, result: found.append(result))
    with torch.no_grad():
        model(x)
        assert torch.equal(extractor(x)[layer], found[0])
