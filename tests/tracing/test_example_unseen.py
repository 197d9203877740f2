"""Code that computes past every call that a trace sees: refused where it is opened, right where it stays whole."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import image, same
from sources import run_source
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack, to_dlpack

import featx


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x) + x.sum(0)


@torch.jit.script
def scripted_write(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 7


# Reached through objects, so that no global name of this file leads to them.
HIDDEN = SimpleNamespace(call=scripted, write=scripted_write, squared=Squared.apply, draw=random.random)
del scripted, scripted_write, Squared


def calls_scripted(x: torch.Tensor) -> torch.Tensor:
    return HIDDEN.call(x)


def calls_scripted_by_value(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 1e9 else HIDDEN.call(x)


def written_by_scripted(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    HIDDEN.write(y)
    return y * 3


def calls_autograd(x: torch.Tensor) -> torch.Tensor:
    return HIDDEN.squared(x)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, x, use_reentrant=True) * x  # pyright: ignore[reportReturnType]


def draws(x: torch.Tensor) -> torch.Tensor:
    return x * HIDDEN.draw()


def draws_by_its_name(x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.5 else -x


UNSEEN = {
    "scripted": calls_scripted,
    "scripted, in a trace for real": calls_scripted_by_value,
    "scripted write": written_by_scripted,
    "autograd": calls_autograd,
    "reentrant checkpoint": checkpointed,
}
DRAWS = {"hidden": draws, "by its name": draws_by_its_name}


class Calling(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)) + 1


@pytest.mark.parametrize("name", [*UNSEEN, *DRAWS])
def test_what_runs_unseen_is_refused_where_it_would_be_in_the_graph(name: str) -> None:
    with pytest.raises(featx.TraceError, match=r"scripted code|gradient mode is switched|random generator"):
        featx.trace(Calling({**UNSEEN, **DRAWS}[name]), image())


@pytest.mark.parametrize("name", UNSEEN)
def test_module_that_computes_unseen_stays_whole(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Calling(UNSEEN[name]), nn.Linear(4, 4))
    extractor = featx.create_feature_extractor(model, ["1", "2"], example_inputs=image())
    names, _ = featx.get_graph_node_names(model, example_inputs=image())
    assert names == ["input", "0", "1", "2"]
    for rows in (2, 5):
        x, y = (torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_() for _ in range(2))
        features = extractor(x)
        middle = model[1](model[0](y))
        assert same(features, {"1": middle, "2": model[2](middle)})
        features["2"].sum().backward()
        model(y).sum().backward()
        gradient = x.grad
        assert gradient is not None
        assert torch.equal(gradient, y.grad)  # pyright: ignore[reportArgumentType]


def draws_and_cannot_be_traced(x: torch.Tensor) -> torch.Tensor:
    return x * HIDDEN.draw() * float(x.detach().numpy().max())


@pytest.mark.parametrize("function", [draws, draws_and_cannot_be_traced])
def test_generator_of_python_is_put_back_whatever_happens(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Calling(function)
    state = random.getstate()
    with pytest.raises(featx.TraceError):
        featx.trace(model, image())
    assert random.getstate() == state


def test_module_that_draws_from_python_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Calling(draws_by_its_name), nn.Linear(4, 4))
    state = random.getstate()
    extractor = featx.create_feature_extractor(model, ["1", "2"], example_inputs=image())
    assert random.getstate() == state
    for seed in range(4):
        random.seed(seed)
        features = extractor(image())
        random.seed(seed)
        assert torch.equal(features["2"], model(image()))
    random.setstate(state)


@pytest.mark.slow
def test_statistics_that_scripted_code_writes_are_put_back() -> None:
    class ByValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.jit.script(nn.BatchNorm1d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y if bool(y.sum() > 1e9) else y * 2

    model = ByValue()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traced = featx.trace(model, image())
    assert same(dict(model.state_dict()), before)
    reference = ByValue()
    assert torch.equal(traced(image()), reference(image()))
    assert same(dict(model.state_dict()), dict(reference.state_dict()))


class Table:
    """What a model keeps beside its modules."""

    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        self.deeper: dict[str, list[torch.Tensor]] = {"kept": []}

    def of(self, size: int) -> torch.Tensor:
        if self.values is None or self.values.shape[0] != size:
            self.values = torch.arange(size).float()
        return self.values


SHARED = Table()


class Keeping(nn.Module):
    def __init__(self, keep: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = Table()
        self.keep = keep
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keep(self, self.linear(x))


def in_an_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + model.table.of(x.shape[1])


def in_a_global_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x + SHARED.of(x.shape[1])


@pytest.mark.parametrize("keep", [in_an_object, in_a_global_object])
def test_table_in_a_plain_object_is_made_anew(keep: Any) -> None:
    model = Keeping(keep)
    traced = featx.trace(model, image())
    assert model.table.values is None
    assert SHARED.values is None
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(traced(x), model(x))
        assert torch.equal(model(x), traced(x))
    SHARED.values = None


def in_an_object_that_is_read(model: Any, x: torch.Tensor) -> torch.Tensor:
    last = model.table.values
    model.table.values = x
    return x if last is None else x + last


def deep_in_an_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.table.deeper["kept"].append(x)
    return x * len(model.table.deeper["kept"])


def in_a_count_that_it_makes(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count = getattr(model, "count", 0) + 1
    return x * model.count


REFUSED: dict[Any, str] = {
    in_an_object_that_is_read: "forward reads what it has computed from the inputs of an earlier call",
    deep_in_an_object: "forward adds to .* and runs other operations in a second call",
    in_a_count_that_it_makes: "forward tests whether it has already created the attribute 'count'",
}


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "message"), REFUSED.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_what_the_next_call_would_find_is_refused(keep: Any, message: str) -> None:
    model = Keeping(keep)
    with pytest.raises(featx.TraceError, match=message):
        featx.trace(model, image())
    assert model.table.values is None
    assert model.table.deeper == {"kept": []}
    assert not hasattr(model, "count")


def length_of_its_digits(x: torch.Tensor) -> torch.Tensor:
    return x * len(f"{x.shape[0]}")


def length_of_its_text(x: torch.Tensor) -> torch.Tensor:
    return x * len("%s" % (x.shape[0],))  # noqa: UP031 - what models do


def looked_up_by_its_text(x: torch.Tensor) -> torch.Tensor:
    return x * {"2": 3}.get(str(x.shape[0]), 1)


WITH_MESSAGES = """
def with_messages(x):
    torch._assert(x.dim() == 2, f"{x.shape[0]} rows, {x.shape}")
    assert x.dim() == 2, f"{x.shape[0]} rows"
    if x.dim() != 2:
        raise ValueError(f"{x.shape[0]} rows")
    print("%d rows" % x.shape[0], str(x.shape[0]) + "!")
    return x * 2
"""


@pytest.mark.parametrize("function", [length_of_its_digits, length_of_its_text, looked_up_by_its_text])
def test_text_of_a_size_fixes_it(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    traced = featx.trace(Calling(function), image())
    with pytest.raises(featx.SpecializationError):
        traced(torch.randn(12, 4))


def test_text_of_a_size_in_a_message_leaves_it_free() -> None:
    model = Calling(run_source(WITH_MESSAGES, torch=torch)["with_messages"])
    x = torch.randn(12, 4)
    assert torch.equal(featx.trace(model, image())(x), model(x))


def require(ok: object, message: str) -> None:
    if ok is None:
        raise ValueError(message)


def with_text_of_values(x: torch.Tensor) -> torch.Tensor:
    require(x, f"{x}, of sum {x.sum():.3f} and {x!r}")
    require(x, "or " + str(x.max()))
    return x * 2


def test_text_of_values_in_a_message_is_no_decision() -> None:
    model = Calling(with_text_of_values)
    x = torch.randn(12, 4)
    assert torch.equal(featx.trace(model, image())(x), model(x))


def test_text_of_values_that_decides_is_checked() -> None:
    def by_sign(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if f"{x.sum():.3f}".startswith("-") else x

    model = Calling(by_sign)
    traced = featx.trace(model, torch.ones(3, 4))
    assert torch.equal(traced(torch.ones(3, 4)), model(torch.ones(3, 4)))
    with pytest.raises(featx.SpecializationError):
        traced(-torch.ones(3, 4))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_try_of_the_caller_is_none_of_the_model(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first).eval()
    try:
        traced = featx.trace(layer, torch.randn(2, 3, 4))
    except ValueError:
        raise AssertionError from None
    x = torch.randn(5, 3, 4)
    assert torch.equal(traced(x), layer(x))


def test_type_of_a_tensor_as_a_string() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.type() == "torch.FloatTensor" else x

    traced = featx.trace(Asking(), image())
    assert torch.equal(traced(image()), image() * 2)
    with pytest.raises(featx.SpecializationError):
        traced(image().double())


class ThroughACapsule(nn.Module):
    """Hands a tensor on through DLPack: torch calls nothing that a trace sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).detach()
        return from_dlpack(to_dlpack(hidden)) * 2


def test_tensor_that_comes_back_through_a_capsule_is_refused() -> None:
    x = torch.rand(2, 4)
    with pytest.raises(featx.TraceError, match="shares the storage of another one"):
        featx.trace(ThroughACapsule(), x)
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(ThroughACapsule(), ["output"], example_inputs=x)


def test_capsule_inside_a_module_that_is_kept_whole_is_its_own() -> None:
    model, x = nn.Sequential(ThroughACapsule(), nn.Linear(4, 2)), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=x)
    assert torch.equal(extractor(x + 1)["1"], model(x + 1))


def test_traced_value_that_is_passed_to_ctypes_is_refused() -> None:
    class Casting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]

    with pytest.raises(featx.TraceError, match="ctypes"):
        featx.symbolic_trace(Casting())
