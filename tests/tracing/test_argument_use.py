"""argument_use: the lines of code that write an argument in place. Comments in the code below say which they are."""

from __future__ import annotations

import functools
import inspect
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx.tracing.history.opaque_call import OpaqueCall
from featx.tracing.source_writes.argument_use import argument_use
from featx.tracing.source_writes.possible_writes import module_may_write_more

TABLE: dict[str, Any] = {}


class Plain(nn.Module):
    def forward(self, x: torch.Tensor, mask: Any = None, *others: Any, size: int = 1, **rest: Any) -> Any:
        x.mul_(2)  # always
        if mask is not None:
            x[mask] = 0  # sometimes
            x[0][mask] += 1  # sometimes
            x += 1  # sometimes
            x.view(-1).add_(2)  # sometimes
            x.data[0] = 0  # sometimes
            functional.relu(x, inplace=True)  # sometimes
            torch.relu_(x)  # sometimes
            nn.init.zeros_(x)  # sometimes
            torch.Tensor.add_(x, 1)  # sometimes
            torch._foreach_mul_([x], 2.0)  # sometimes
            torch.transpose(x, 0, 1).add_(1)  # sometimes
            x.broadcast_to(2, 3).add_(1)  # sometimes
            x.long().add_(1)  # sometimes
            torch.nn.functional.elu_(x)  # sometimes
            torch.add(x, 1, out=x)  # sometimes
            del x[0]  # sometimes
        for other in others:
            other[0] = 0  # sometimes
        for key, value in rest.items():
            value.zero_()  # sometimes
            TABLE[key] = value
        half, rest_of_it = x.chunk(2)
        flat = half
        if mask is not None:
            rest_of_it[0] = 0  # sometimes
            flat.zero_()  # sometimes
        flat = flat.clone()
        flat.zero_()
        if size > 1:
            flat = x.reshape(-1)
        flat += 1  # always
        size += 1
        return x


class Fresh(nn.Module):
    """Writes what is its own."""

    def forward(self, x: torch.Tensor, sizes: list[int], depth: int | None = None) -> Any:
        made = {}
        if x.shape[0] > 1:
            made["x"] = x
            self.last = x
            self.steps[0] = x
            noise = x.new_empty(3).bernoulli_(0.5)
            noise.div_(2)
            sizes[0] = 3
            depth += 1
            y = self.layer(x)
            y[0] = 1
            y += x
            x = x.clone()
            x[0] = 1
        return made


class Helping(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[0] < 3:
            return x
        x.add_(1)  # sometimes
        self.help(x)
        Helping.other(x)
        above(x)
        return [part.zero_() for part in x]  # sometimes

    def help(self, x: torch.Tensor) -> None:
        x.add_(1)  # sometimes

    @staticmethod
    def other(x: torch.Tensor) -> None:
        def inner() -> None:
            x.add_(1)  # sometimes

        inner()

    def unused(self, x: torch.Tensor) -> None:
        x.add_(1)


def above(x: torch.Tensor) -> None:
    x.add_(1)  # sometimes


def optional(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x.add_(1) if inplace else x + 1


def partly_optional(x: torch.Tensor, pieces: list, inplace: bool = False) -> torch.Tensor:  # type: ignore[type-arg]
    if x.shape[0] > 3:
        x.add_(1)  # sometimes
        pieces[0].zero_()  # sometimes
    if inplace:
        x.mul_(2)
    return functional.relu(x, inplace=inplace)


def test_option_in_one_line_excuses_no_other() -> None:
    found = argument_use(partly_optional)
    assert {line for _, line in found.sometimes} == marked(partly_optional, word="sometimes")


def marked(*pieces: Any, word: str) -> set[int]:
    found: set[int] = set()
    for piece in pieces:
        lines, first = inspect.getsourcelines(piece)
        found |= {first + at for at, line in enumerate(lines) if re.search(f"# {word}$", line.rstrip())}
    return found


@pytest.mark.parametrize("pieces", [(Plain,), (Fresh,), (Helping, above)])
def test_lines_are_those_that_the_comments_name(pieces: tuple[Any, ...]) -> None:
    found = argument_use(pieces[0].forward, pieces[0])
    always, sometimes = ({line for _, line in lines} for lines in (found.always, found.sometimes))
    assert always == marked(*pieces, word="always")
    assert sometimes == marked(*pieces, word="sometimes")


@pytest.mark.parametrize("function", [optional, len, torch.relu, functional.relu, nn.Linear.forward])
def test_options_and_code_of_torch_count_as_no_condition(function: Any) -> None:
    found = argument_use(function)
    assert not found.always | found.sometimes


class Pair(NamedTuple):
    first: Any
    second: Any


def returns_fresh(x: torch.Tensor, n: int) -> Any:
    x = x + 1
    y = [x.relu(), functional.relu(x)]
    if n > 1:
        return n
    return y[0] + x, x.clone()


def appends(x: torch.Tensor) -> list[torch.Tensor]:
    outs = [x.relu()]
    for _ in range(3):
        outs.append(x)
        x = x.relu()
    return outs


def adds_items(x: torch.Tensor) -> dict[str, torch.Tensor]:
    outs = OrderedDict[str, torch.Tensor]()
    outs["x"] = x
    return outs


def extends(x: torch.Tensor) -> list[torch.Tensor]:
    outs: list[torch.Tensor] = []
    outs += [x]
    return outs


def fills(x: torch.Tensor) -> Any:
    sums = x.new_zeros(8)
    sums[0] = x[0]
    outs = []
    outs.append(x.relu())
    sums += x
    return outs, sums


RETURNING = [
    appends,
    adds_items,
    extends,
    lambda x: x,
    lambda x, c: x + 1 if c else x,
    lambda x: x.view(-1)[0],
    lambda x: torch.squeeze(x),
    lambda x: functional.relu(x, inplace=True),
    lambda x: (1, x),
    lambda x: {"x": x},
    lambda x: Pair(1, x),
    lambda x: above_that_returns(x) + 1,
    lambda *xs: xs[0],
    lambda **xs: xs["x"],
]


def above_that_returns(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(3):
        y = y.t()
    y += 1
    return y


@pytest.mark.parametrize("function", RETURNING)
def test_function_that_may_return_an_argument_is_found(function: Any) -> None:
    assert argument_use(function).is_returned


@pytest.mark.parametrize("function", [returns_fresh, fills, above, len, lambda x: x.relu(), lambda x: torch.relu(x)])
def test_function_that_returns_what_is_new_is_told_apart(function: Any) -> None:
    assert not argument_use(function).is_returned


class WithCache(nn.Module):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if cache is not None:
            cache.is_updated[0] = True
        return x


def test_argument_that_is_given_nothing_is_not_written() -> None:
    assert len(argument_use(WithCache.forward, WithCache).sometimes) == 1
    assert not argument_use(WithCache.forward, WithCache, absent=frozenset({"cache"})).sometimes


class OfCache(nn.Module):
    """Gives the module inside a cache where it is set to, which forward makes."""

    def __init__(self, kind: type[nn.Module], cache: Any) -> None:
        super().__init__()
        self.inner = kind()
        self.cache = cache

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, cache=self.cache)


def _renamed(function: Any) -> Any:
    @functools.wraps(function)
    def forward(self: Any, x: torch.Tensor, *, cache: Any) -> Any:
        return function(self, x, state=cache)

    return forward


class Renamed(nn.Module):
    """Its forward has another name for the argument than the one by which it is given."""

    @_renamed
    def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
        if state is not None:
            state.items[0] = 0
        return x


@pytest.mark.parametrize(
    ("kind", "cache", "may_write"),
    [(WithCache, None, False), (WithCache, "text", False), (WithCache, [1], True), (Renamed, [1], True)],
)
def test_module_may_write_what_it_was_given(kind: type[nn.Module], cache: Any, may_write: bool) -> None:
    model = OfCache(kind, cache)
    call = OpaqueCall()
    call.note_run(model, (torch.ones(2),), {})
    call.note_run(model.inner, (torch.ones(2),), {"cache": cache})
    assert module_may_write_more(model, call.ran) is may_write


class OfSteps(nn.Module):
    """A method with an int as default, as that of T5 for the buckets of relative positions."""

    steps = 3

    def forward(self, x: torch.Tensor, count: Any = 2) -> Any:
        return x * self.halved(x, count=self.steps)

    def halved(self, x: torch.Tensor, count: Any = 2) -> Any:
        if x.shape[0] > 1:
            count //= 2
        return count


class OfTensors(OfSteps):
    def forward(self, x: torch.Tensor, count: Any = 2) -> Any:
        return self.halved(x, count)


class OfNamedTensors(OfSteps):
    def forward(self, x: torch.Tensor, count: Any = 2) -> Any:
        return self.halved(x, count=count)


class OfManyTensors(OfSteps):
    def forward(self, *x: torch.Tensor, count: Any = 2) -> Any:
        return self.halved(*x)


class NamesMethod(OfSteps):
    def forward(self, x: torch.Tensor, count: Any = 2) -> Any:
        call = self.halved
        return self.halved(x, self.steps) + call(x, count)


def half_of(x: torch.Tensor, count: Any = 2) -> Any:
    if x.shape[0] > 1:
        count //= 2
    return count


other_name = half_of


class OtherName(OfSteps):
    def forward(self, x: torch.Tensor, count: Any = 2) -> Any:
        return other_name(x, count)


class Adds(nn.Module):
    def forward(self, x: torch.Tensor, total: Any = 0) -> Any:
        if x.shape[0] > 1:
            total += x
        return x


@pytest.mark.parametrize(
    ("kind", "writes"),
    [
        (OfSteps, 0),
        (OfTensors, 1),
        (OfNamedTensors, 1),
        (OfManyTensors, 1),
        (NamesMethod, 1),
        (OtherName, 1),
        (Adds, 1),
    ],
)
def test_argument_with_an_int_as_default_is_one_if_a_call_gives_one(kind: type[nn.Module], writes: int) -> None:
    assert len(argument_use(kind.forward, kind).lines) == writes


class Totals(nn.Module):
    def forward(self, x: torch.Tensor, mask: Any = None, total: Any = None) -> torch.Tensor:
        if x.sum() > 50:
            total.add_(x)
        return x * 2


def _patched() -> nn.Module:
    def forward(x: torch.Tensor, mask: Any = None, total: Any = None) -> torch.Tensor:
        return Totals.forward(module, x, mask, total)

    module = Totals()
    module.forward = forward
    return module


def _hooked() -> nn.Module:
    module = Totals()
    module.register_forward_pre_hook(lambda module, args: (args[0], None, args[1]))
    return module


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def forward(self: Any, x: torch.Tensor, total: Any) -> Any:
        return function(self, x, None, total)

    return forward


class Wrapped(nn.Module):
    @_wrapped
    def forward(self, x: torch.Tensor, mask: Any = None, total: Any = None) -> torch.Tensor:
        if x.sum() > 50:
            total.add_(x)
        return x * 2


@pytest.mark.parametrize(("module", "is_third"), [(Totals(), True), (_patched(), True), (_hooked(), False)])
def test_what_gives_other_arguments_to_forward_is_not_trusted(module: nn.Module, is_third: bool) -> None:
    call, x = OpaqueCall(), torch.ones(2)
    call.note_run(module, (x, None, x) if is_third else (x, x), {})
    assert module_may_write_more(module, call.ran)


def test_what_decorates_forward_is_not_trusted() -> None:
    module, call, x = Wrapped(), OpaqueCall(), torch.ones(2)
    call.note_run(module, (x, x), {})
    assert module_may_write_more(module, call.ran)
