"""The similarity example: CKA has the properties that its paper proves, and reads what hooks see."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "similarity.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_similarity", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def features_of(width: int, seed: int) -> torch.Tensor:
    return torch.randn(50, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cka_of_features_with_themselves_is_one(example: Any) -> None:
    assert example.linear_cka(features_of(7, 0), features_of(7, 0)) == pytest.approx(1.0)


def test_rotation_scale_and_shift_change_nothing(example: Any) -> None:
    first, second = features_of(7, 0), features_of(5, 1)
    rotation = torch.linalg.qr(features_of(7, 2)[:7]).Q
    expected = example.linear_cka(first, second)
    assert 0 < expected < 0.9
    assert example.linear_cka(3.0 * first @ rotation + 2.0, second) == pytest.approx(expected)
    assert example.linear_cka(second, first) == pytest.approx(expected)
    assert example.linear_cka(first * torch.arange(1.0, 8.0), second) != pytest.approx(expected)


def test_cka_is_that_of_the_features_in_the_paper(example: Any) -> None:
    # Equation 5 of Kornblith et al.: |Y'X|^2 / (|X'X| |Y'Y|) in Frobenius norms, for centered X and Y.
    x, y = (value - value.mean(0) for value in (features_of(7, 0), features_of(5, 1)))
    expected = (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert example.linear_cka(features_of(7, 0), features_of(5, 1)) == pytest.approx(expected.item())


def test_table_has_the_cka_of_each_pair(example: Any) -> None:
    first = {"a": features_of(3, 0), "b": features_of(4, 1)}
    second = {"c": features_of(5, 2), "d": first["b"], "e": first["a"]}
    found = example.compare(first, second)
    expected = [[example.linear_cka(one, other) for other in second.values()] for one in first.values()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert found[0, 2] == pytest.approx(1.0)


@pytest.mark.slow
def test_features_are_what_hooks_see(example: Any) -> None:
    network = example.create_network(0, width=4, depth=3)
    images = torch.rand(5, 1, 8, 8)
    seen: dict[str, torch.Tensor] = {}
    for name in ("0.2", "1.2", "2.2", "3.1"):
        network.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update({name: output.flatten(1).clone()})
        )
    with torch.no_grad():
        network(images)
    expected = list(seen.values())
    found = example.layer_features(network, images)
    assert list(found) == ["relu 0.2", "relu 1.2", "relu 2.2", "linear 3.1"]
    assert all(torch.equal(value, other) for value, other in zip(found.values(), expected, strict=True))


@pytest.mark.slow
def test_example_runs(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["similarity.py", "--steps", "3", "--output", str(tmp_path / "figure.png")])
    create = example.create_network
    monkeypatch.setattr(example, "create_network", lambda seed: create(seed, width=4, depth=2))
    example.main()
    assert "network A and itself: CKA of layers at the same depth 1.00" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 10_000
