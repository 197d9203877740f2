"""Write an own Interpreter: find the first node of a model whose values are no numbers any more.

python examples/transforms/find_nan.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import featx


class NotFinite(Exception):
    """A node made NaN or infinity of finite inputs."""


class FiniteInterpreter(featx.Interpreter):
    """Runs a graph, and raises NotFinite at the first node whose result has NaN or infinity in it."""

    def run_node(self, n: featx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            name = n.meta.get("qualified_name", n.name)
            raise NotFinite(f"{bad} of {value.numel()} values of '{name}' ({n.meta.get('source', 'no source')})")
        return value


class Logarithm(nn.Module):
    """Takes the logarithm of something that may be negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log().exp()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Logarithm()), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    try:
        FiniteInterpreter(featx.trace(model, x)).run(x)
    except NotFinite as error:
        print(error)


if __name__ == "__main__":
    main()
