"""Turn a case, which is the source of a model and how to call it, into modules and into calls of many sizes."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections import UserDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx
from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SHAPES: tuple[tuple[int, ...], ...] = (
    (3, 4), (1, 4), (4, 4), (2, 4), (2, 4, 6, 6), (1, 4, 6, 6), (4, 4, 4, 6), (4, 4, 4, 4), (2, 4, 1, 6),
    (3, 4, 1, 1), (2, 4, 18, 16), (5, 4, 12, 12),  # larger than what keeps its values in a trace
)  # fmt: skip

_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """The source of a class Model, the shape of the first input, and how forward is called."""

    source: str
    shape: tuple[int, ...] = (3, 4)
    signature: str = "x"
    training: bool = False
    grad: bool = False
    notes: tuple[int, ...] = (0,) * 6

    def __str__(self) -> str:
        how = f"shape={self.shape}, signature={self.signature!r}, training={self.training}, grad={self.grad}"
        return f"# {how}\n{self.source.strip()}\n"


@dataclass(frozen=True)
class Signature:
    """Parameters of forward, its first lines, the variables they bind, and the calls of it: the first is traced."""

    text: str
    prologue: tuple[str, ...]
    calls: tuple[Callable[[torch.Tensor, torch.Tensor], Arguments], ...]
    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


SIGNATURES: tuple[Signature, ...] = (
    Signature("x", (), (lambda x, y: ((x,), {}), lambda x, y: ((), {"x": x}))),
    Signature(
        "x, y", (), (lambda x, y: ((x, y), {}), lambda x, y: ((x, x), {}), lambda x, y: ((x,), {"y": y})), ("y",)
    ),
    Signature(
        "x, y=None",
        ("if y is not None:", "    x = x + y"),
        (lambda x, y: ((x,), {}), lambda x, y: ((x, y), {}), lambda x, y: ((x,), {"y": y})),
    ),
    Signature(
        "x, *, y=None",
        ("y = x if y is None else y",),
        (lambda x, y: ((x,), {"y": y}), lambda x, y: ((x,), {}), lambda x, y: ((x,), {"y": y[:1]})),
        ("y",),
    ),
    Signature(
        "x, scale=2",
        ("x = x * scale",),
        (lambda x, y: ((x,), {}), lambda x, y: ((x, 3), {}), lambda x, y: ((x,), {"scale": 0.5})),
        (),
        ("scale",),
    ),
    Signature(
        "x, scale",
        (),
        (lambda x, y: ((x, 3), {}), lambda x, y: ((x, 5), {}), lambda x, y: ((x, True), {})),
        (),
        ("scale",),
    ),
    Signature(
        "x, flag=False",
        ("if flag:", "    x = x.relu()"),
        (lambda x, y: ((x,), {}), lambda x, y: ((x, True), {})),
    ),
    Signature(
        "xs",
        ("x, y = xs[0], xs[-1]",),
        (lambda x, y: (([x, y],), {}), lambda x, y: (([x],), {}), lambda x, y: (((x, x, y),), {})),
        ("y",),
    ),
    Signature(
        "batch",
        ("x, y = batch['x'], batch.get('y', batch['x'])",),
        (lambda x, y: (({"x": x, "y": y},), {}), lambda x, y: (({"x": x},), {})),
        ("y",),
    ),
    Signature(
        "x, *rest",
        ("y = rest[0] if rest else x",),
        (lambda x, y: ((x, y), {}), lambda x, y: ((x,), {}), lambda x, y: ((x, y, y), {})),
        ("y",),
    ),
    Signature(
        "x, **options",
        ("y = options.get('y', x)",),
        (lambda x, y: ((x,), {"y": y}), lambda x, y: ((x,), {}), lambda x, y: ((x,), {"z": y})),
        ("y",),
    ),
    Signature(
        "box",
        ("x, y = box.x, box.y",),
        (
            lambda x, y: ((SimpleNamespace(x=x, y=y, scale=2),), {}),
            lambda x, y: ((SimpleNamespace(x=x, y=x, scale=2),), {}),
            lambda x, y: ((SimpleNamespace(x=x, y=y, scale=3),), {}),
        ),
        ("y",),
        ("box.scale",),
    ),
    Signature(
        "bag",
        ("x, y = bag['x'], bag['y']",),
        (lambda x, y: ((UserDict(x=x, y=y),), {}), lambda x, y: ((UserDict(x=y, y=x, z=x),), {})),
        ("y",),
    ),
)


@contextmanager
def built(case: Case) -> Generator[nn.Module, None, None]:
    """The model of a case, with the weights of a fixed seed, as a Python module of its own that ends with the block."""
    module = types.ModuleType(f"soundness_case_{next(_numbers)}")
    module.__file__ = filename = f"/soundness/{module.__name__}.py"
    linecache.cache[filename] = (len(case.source), None, case.source.splitlines(keepends=True), filename)
    sys.modules[module.__name__] = module
    try:
        exec(compile(case.source, filename, "exec"), module.__dict__)
        torch.manual_seed(0)
        yield module.Model().train(case.training)
    finally:
        del sys.modules[module.__name__], linecache.cache[filename]
        # What torch.fx.wrap has marked would be kept for good, and looked up by each trace from then on.
        marked = torch.fx._symbolic_trace._wrapped_fns_to_patch
        for key in [key for key, namespace in marked.items() if namespace is module.__dict__]:
            del marked[key]


def example(case: Case) -> Arguments:
    """The call that is traced."""
    return _call(case, 0, _tensor(case.shape, 0), _tensor(case.shape, 1))


def calls(case: Case) -> Iterator[tuple[str, Arguments]]:
    """Yield calls with what is special about each: other values, sizes, layouts, types, arguments."""
    shape = case.shape
    sizes = [
        ("other batch", (shape[0] + 2, *shape[1:])),
        ("batch of 1", (1, *shape[1:])),
        ("batch as channels", (4, *shape[1:])),
        ("empty batch", (0, *shape[1:])),
        ("other channels", (shape[0], 6, *shape[2:])),
    ]
    if len(shape) == 4:
        sizes += [("other height", (shape[0], 4, 8, shape[3])), ("other size", (shape[0] + 1, 4, 5, 7))]
    x, y = _tensor(shape, 2), _tensor(shape, 3)
    yield "same sizes", _call(case, 0, x, y)
    for label, other in sizes:
        yield label, _call(case, 0, _tensor(other, 4), _tensor(other, 5))
    yield "another rank", _call(case, 0, _tensor((2, *shape), 4), _tensor((2, *shape), 5))
    yield "negative", _call(case, 0, -x.abs(), y)
    yield "zeros", _call(case, 0, torch.zeros(shape), y)
    yield "nan", _call(case, 0, torch.full(shape, float("nan")), y)
    yield "strides", _call(case, 0, x.transpose(1, -1).contiguous().transpose(1, -1), y)
    yield "steps", _call(case, 0, torch.cat([x, x], dim=-1)[..., ::2], y)
    yield "double", _call(case, 0, x.double(), y.double())
    yield "ints", _call(case, 0, (x * 3).long(), (y * 3).long())
    if case.grad:
        yield "requires grad", _call(case, 0, x.clone().requires_grad_(), y)
    yield "other grad mode", _call(case, 0, x, y)
    for place in range(1, len(_signature(case).calls)):
        yield f"call {place}", _call(case, place, x, y)
    yield "example", example(case)


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors in arguments."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, dict):
        return {key: as_dtype(item, dtype) for key, item in value.items()}
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**as_dtype(vars(value), dtype))
    if isinstance(value, UserDict):
        return UserDict(as_dtype(value.data, dtype))
    return type(value)(as_dtype(item, dtype) for item in value) if isinstance(value, (tuple, list)) else value


def _signature(case: Case) -> Signature:
    return next(signature for signature in SIGNATURES if signature.text == case.signature)


def _call(case: Case, place: int, x: torch.Tensor, y: torch.Tensor) -> Arguments:
    return _signature(case).calls[place](x, y)


def _tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.25
