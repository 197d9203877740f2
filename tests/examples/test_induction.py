"""The induction example: attention patterns and edits give what plain PyTorch gives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

PATH = Path(__file__).parents[2] / "examples" / "induction.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_induction", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def by_hand(model: Any, tokens: Tensor, change: dict[int, Any], heads: int) -> tuple[list[Tensor], Tensor]:
    """Compute patterns and logits from the weights, with functions of the heads' outputs by layer."""
    x = model.token(tokens)
    patterns: list[Tensor] = []
    for number, layer in enumerate(model.layers):
        query, key, value = layer.project_in(layer.norm(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        for place in range(tokens.shape[1]):
            for other in range(tokens.shape[1]):
                later = other > place
                scores[..., place, other] += float("-inf") if later else layer.bias[:, place - other]
        patterns.append(scores.softmax(-1))
        outputs = patterns[-1] @ value
        outputs = change[number](outputs) if number in change else outputs
        x = x + layer.project_out(outputs.transpose(1, 2).flatten(2))
    return patterns, model.head(model.norm(x))


def zeroed(head: int) -> Any:
    def change(outputs: Tensor) -> Tensor:
        outputs = outputs.clone()
        outputs[:, head] = 0
        return outputs

    return change


@pytest.mark.slow
@torch.no_grad()
def test_patterns_and_logits_are_those_computed_by_hand(example: Any) -> None:
    model = example.Transformer().eval()
    tokens = example.sequences(3, example.PERIOD)
    found = example.run(model, tokens)
    patterns, logits = by_hand(model, tokens, {}, example.HEADS)
    for layer in (0, 1):
        torch.testing.assert_close(found[example.PATTERN.format(layer)], patterns[layer])
    torch.testing.assert_close(found["output"], logits)
    assert torch.equal(found["output"], model(tokens))


@pytest.mark.slow
@torch.no_grad()
def test_setting_a_head_to_zero_by_an_edit_equals_doing_so_by_hand(example: Any) -> None:
    model = example.Transformer().eval()
    tokens = example.sequences(3, example.PERIOD)
    name = example.OUTPUT.format(0)
    found = example.run(model, tokens, {name: lambda value: example.with_head(value, 2, 0.0)})
    patterns, logits = by_hand(model, tokens, {0: zeroed(2)}, example.HEADS)
    torch.testing.assert_close(found["output"], logits)
    torch.testing.assert_close(found[example.PATTERN.format(1)], patterns[1])
    assert not torch.allclose(found["output"], model(tokens))


@pytest.mark.slow
@torch.no_grad()
def test_patching_a_head_equals_a_hook_that_changes_what_the_projection_reads(example: Any) -> None:
    model = example.Transformer().eval()
    tokens, others = example.sequences(3, example.PERIOD), example.sequences(3, example.PERIOD)
    name, head, width = example.OUTPUT.format(1), 3, example.WIDTH // example.HEADS
    clean, other = example.run(model, tokens)[name], example.run(model, others)[name]
    found = example.run(model, tokens, {name: example.with_head(clean, head, other)})

    inputs: list[Tensor] = []
    projection = model.layers[1].project_out
    handle = projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    model(others)
    handle.remove()

    def patch(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        patched = args[0].clone()
        patched[..., head * width : (head + 1) * width] = inputs[0][..., head * width : (head + 1) * width]
        return (patched,)

    with projection.register_forward_pre_hook(patch):
        expected = model(tokens)
    torch.testing.assert_close(found["output"], expected)


def test_sequences_repeat_their_block_and_loss_is_over_the_repeats(example: Any) -> None:
    tokens = example.sequences(4, 10)
    assert torch.equal(tokens[:, 10:20], tokens[:, :10])
    assert all(len(set(row.tolist())) == 10 for row in tokens)
    logits = torch.randn(4, example.LENGTH, example.TOKENS)
    expected = torch.stack([F.cross_entropy(logits[:, i], tokens[:, i + 1]) for i in range(10, example.LENGTH - 1)])
    torch.testing.assert_close(example.loss_on_repeats(logits, tokens, 10), expected.mean())


@pytest.mark.slow
def test_example_trains_patches_and_draws(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["induction.py", "--steps", "2", "--output", str(tmp_path / "figure.png")])
    example.main()
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "previous-token scores" in capsys.readouterr().out
