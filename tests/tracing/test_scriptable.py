"""torch.jit.script of what the example tracer records: values are the model's, and the checks still refuse."""

# Inputs without annotations are part of what is tested.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx
from featx.errors import ScriptError

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def deprecation_is_known() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit")
        yield


class Options(nn.Module):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, double: bool = True, kind: str = "a", plain=None, flag=False
    ) -> Tensor:
        if mask is not None or plain is not None:
            x = x * 3
        if double and kind == "a" and not flag:
            x = x * 2
        return x


class Decided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 1 else x


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        items = [0] * x.shape[1]
        return (x + self.table * len(items)).sum(dim=0).squeeze()


class ByDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.finfo(x.dtype).eps


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.relu_() + 1


class OverwrittenList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = x.mul(2).chunk(2, dim=1)
        parts[0].relu_()
        return parts[0] + parts[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None] - 0.5
        return self.attention(x, x, x, need_weights=False)[0] + 1


def extractor(model: nn.Module, *names: str, example: Any = X) -> featx.GraphModule:
    return featx.create_feature_extractor(model.eval(), list(names), example_inputs=example)


class FourParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x: Tensor) -> Tensor:
        first, _, _, last = self.parts(x)
        return first + last


class Parts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x, x * 2, x * 3, x.sum(dim=0)


MODELS: dict[str, tuple[nn.Module, list[str]]] = {
    "options": (Options(), ["mul"]),
    "decision": (Decided(), ["mul"]),
    "fixed size": (Fixed(), ["add", "squeeze"]),
    "dtype": (ByDtype(), ["add"]),
    "overwritten": (Overwritten(), ["linear", "add"]),
    "overwritten list": (OverwrittenList(), ["chunk", "add"]),
    "four parts": (FourParts(), ["add"]),
    "attention": (Attention(), ["sub", "add"]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gradients", [True, False])
def test_scripted_extractor_computes_what_the_extractor_does(name: str, gradients: bool) -> None:
    model, names = MODELS[name]
    with torch.set_grad_enabled(gradients):
        module = extractor(model, *names)
        torch.testing.assert_close(torch.jit.script(module)(X), module(X), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inputs", "keywords"),
    [
        ("options", (X, X), {}),
        ("options", (X,), {"double": False}),
        ("options", (X,), {"kind": "b"}),
        ("options", (X,), {"plain": X}),
        ("options", (X,), {"flag": True}),
        ("decision", (X[:1],), {}),
        ("fixed size", (X[:, :1],), {}),
        ("dtype", (X.to(torch.complex64),), {}),
    ],
)
def test_scripted_extractor_refuses_what_the_extractor_refuses(name: str, inputs: Any, keywords: Any) -> None:
    model, names = MODELS[name]
    module = extractor(model, *names)
    with pytest.raises(featx.TraceError):
        module(*inputs, **keywords)
    with pytest.raises(torch.jit.Error, match=r"featx\.errors\.\w+: .*traced|the example"):
        torch.jit.script(module)(*inputs, **keywords)


class Rest(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * 2


class NoGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * 2
        return x + 1


class Nested(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["a"] * 2


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for row in range(1, len(x)):
            x = x * row
        return x


class Makes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(y=x * 2)


@pytest.mark.parametrize(
    ("model", "example", "what"),
    [
        (Makes(), X, "objects of classes"),
        (Rest(), (X,), r"\*inputs"),
        (NoGradients(), X, "gradients"),
        (Nested(), ({"a": X},), "nested"),
        (Loop(), X, "range"),
    ],
)
def test_what_torchscript_cannot_express_says_what_to_use(model: nn.Module, example: Any, what: str) -> None:
    name = "output" if isinstance(model, Makes) else "mul"
    module = extractor(model, name, example=example)
    for outer in (module, nn.Sequential(module)):
        with pytest.raises(ScriptError, match=rf"{what}.* torch\.export"):
            torch.jit.script(outer)
