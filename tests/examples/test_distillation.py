"""The distillation example: both extractors give what hooks see, and one loss trains student and projections."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

PATH = Path(__file__).parents[2] / "examples" / "distillation.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_distillation", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def hooked(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *args, name=name: found.update({name: args[2].clone()}))
        for name in ("stage1", "stage2")
    ]
    found["logits"] = model(images)
    for handle in handles:
        handle.remove()
    return found


def test_teacher_extractor_gives_what_hooks_see_in_one_pass(example: Any) -> None:
    teacher = example.Network(8).eval()
    images = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        found, expected = example.teacher_extractor(teacher, images)(images), hooked(teacher, images)
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_loss_and_its_gradients_are_those_of_plain_modules(example: Any) -> None:
    teacher, student = example.Network(example.TEACHER_WIDTH).eval(), example.Network(example.STUDENT_WIDTH).eval()
    images, labels = torch.rand(6, 1, 8, 8), torch.randint(10, (6,))
    extractor = example.student_extractor(student, images)
    projections = dict(extractor.feature_heads.named_children())
    target = example.teacher_extractor(teacher, images)(images)
    found = example.distillation_loss(extractor(images), target, labels, 10.0)
    parameters = [*student.parameters(), *(each for module in projections.values() for each in module.parameters())]
    assert {id(each) for each in parameters} == {id(each) for each in extractor.parameters()}

    teach, learn = hooked(teacher, images), hooked(student, images)
    soft = [F.softmax(values["logits"] / 3, 1) for values in (teach, learn)]
    expected = F.cross_entropy(learn["logits"], labels)
    expected = expected + 9 * (soft[0] * (soft[0] / soft[1]).log()).sum(1).mean()
    for name in ("stage1", "stage2"):
        expected = expected + 10 * (projections[name](learn[name]) - teach[name]).square().mean()
    torch.testing.assert_close(found, expected)
    gradients = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True)
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_example_runs_and_draws(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    argv = ["distillation.py", "--steps", "60", "--students", "1", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    example.main()
    assert path.stat().st_size > 10_000
    assert "logits and layers" in capsys.readouterr().out
