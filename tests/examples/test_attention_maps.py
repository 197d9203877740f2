"""The attention example: probabilities are those of the unfused model, and the fused output stays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import featx

PATH = Path(__file__).parents[2] / "examples" / "attention_maps.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_attention_maps", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_probabilities_are_the_softmax_of_the_unfused_model(example: Any) -> None:
    torch.manual_seed(0)
    model = example.create_model(depth=3).eval()
    images = torch.rand(2, 1, 24, 24)
    extractor = featx.create_feature_extractor(model, {"blocks.*.attn.probabilities": "*", "output": "logits"})
    with torch.no_grad():
        found, logits = extractor(images), model(images)
    assert all(block.attn.fused_attn for block in model.blocks)
    assert torch.equal(found["logits"], logits)
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        model(images)
    assert len(seen) == 3
    for number, expected in enumerate(seen):
        assert expected.shape == (2, 4, 37, 37)
        torch.testing.assert_close(found[str(number)], expected)


@pytest.mark.slow
def test_rollout_multiplies_from_the_first_block_to_the_last(example: Any) -> None:
    first = torch.tensor([[0.0, 1.0], [1.0, 0.0]])[None, None]
    second = torch.tensor([[1.0, 0.0], [0.5, 0.5]])[None, None]
    # (A2 + I) / 2 @ (A1 + I) / 2 = [[1, 0], [0.25, 0.75]] @ [[0.5, 0.5], [0.5, 0.5]], and the other way round
    torch.testing.assert_close(example.rollout([first, second])[0], torch.full((2, 2), 0.5))
    expected = torch.tensor([[0.625, 0.375], [0.625, 0.375]])
    torch.testing.assert_close(example.rollout([second, first])[0], expected)


@pytest.mark.slow
def test_share_of_a_digit_leaves_the_class_token_out(example: Any) -> None:
    attention = torch.tensor([[[0.5, 0.1, 0.3, 0.1]] * 4])
    assert example.share_on_digit(attention, torch.tensor([[False, True, True]])) == pytest.approx(0.8)


@pytest.mark.slow
def test_patches_of_a_scene_are_those_of_its_digit(example: Any) -> None:
    digits = (torch.full((20, 12, 12), 2.0), torch.arange(20) % 10)
    scenes, _, is_digit = example.make_scenes(30, digits, torch.Generator().manual_seed(0))
    patches = scenes[:, 0].unfold(1, 4, 4).unfold(2, 4, 4).amax((3, 4)).flatten(1)
    assert torch.equal(is_digit, patches == 2.0)
    assert torch.equal(is_digit.sum(1), torch.full((30,), 9))


@pytest.mark.slow
def test_example_runs(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["attention_maps.py", "--steps", "3", "--output", str(tmp_path / "figure.png")])
    example.main()
    assert "bit for bit" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 10_000
