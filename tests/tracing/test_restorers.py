"""What a trace changes of the process is put back, also where a part of that raises."""

from __future__ import annotations

import io
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx
from featx.tracing.environment.restorers import run_restorers
from featx.tracing.objects.containers import copy_of, has_items, refill

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
BUFFER = io.BytesIO()
COUNTS = {"calls": 0}


class Locked(dict[str, int]):
    """A dict that refuses to be changed while it is locked."""

    is_locked = True

    def __setitem__(self, key: str, value: int) -> None:
        if self.is_locked:
            raise RuntimeError("it is locked")
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        raise RuntimeError("it is locked")

    def clear(self) -> None:
        raise RuntimeError("it is locked")


LOCKED = Locked(calls=0)


class CountsInLocked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        LOCKED.is_locked = False
        LOCKED["calls"] += 1
        LOCKED["last"] = 1
        LOCKED.is_locked = True
        return x + 1


class ClosesFile(nn.Module):
    """A file that is closed cannot be put back, which raises."""

    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        BUFFER.write(b"x")
        BUFFER.close()
        return x + random.random()


def test_all_restorers_run_whatever_one_raises() -> None:
    ran: list[str] = []

    def raising(name: str, error: type[BaseException]) -> Callable[[], None]:
        def restore() -> None:
            ran.append(name)
            raise error(name)

        return restore

    restorers: list[Callable[[], Any]] = [
        lambda: ran.append("a"), raising("b", KeyError), raising("c", KeyboardInterrupt), raising("d", ValueError),
        raising("e", KeyError),
    ]  # fmt: skip
    interrupted = restorers[2]
    with pytest.raises(KeyboardInterrupt):
        run_restorers(restorers)
    assert ran == ["e", "d", "c", "b", "a"]
    assert restorers == [interrupted], "it is to run again"
    restorers = [lambda: ran.append("last"), raising("f", KeyError), raising("g", ValueError)]
    with pytest.raises(ValueError, match="g"):
        run_restorers(restorers)
    assert ran[-1] == "last"
    assert restorers == []


def test_dict_with_methods_of_its_own_is_put_back_without_them() -> None:
    model = nn.Sequential(CountsInLocked(), nn.Linear(4, 4)).eval()
    featx.create_feature_extractor(model, {"1": "f"}, example_inputs=X)
    assert dict(LOCKED) == {"calls": 0}


def test_trace_leaves_nothing_behind_where_one_object_cannot_be_put_back() -> None:
    global BUFFER
    BUFFER = io.BytesIO()
    model = nn.Sequential(ClosesFile(), nn.Linear(4, 4)).eval()
    names, state, random_state = dict(globals()), torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match="closed file"):
        featx.trace(model, X)
    assert sys.getprofile() is None
    assert COUNTS == {"calls": 0}
    assert all(globals()[name] is value for name, value in names.items())
    assert "range" not in globals()
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == random_state
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(
    "container",
    [{"a": None}, OrderedDict(a=None, b=1), ["a"], deque(["a"]), {"a"}, Locked(a=1)],
    ids=lambda each: type(each).__name__,
)
def test_containers_get_their_items_back(container: Any) -> None:
    items = copy_of(container)
    other = {"b": 1} if isinstance(container, dict) else ["b"]
    kind = next(each for each in (OrderedDict, dict, list, deque, set) if isinstance(container, each))
    kind.clear(container)
    (kind.extend if isinstance(container, (list, deque)) else kind.update)(container, other)
    assert not has_items(container, items)
    refill(container, items)
    assert has_items(container, items)
    assert list(container) == list(items)


def test_no_item_is_another_one_than_none() -> None:
    assert not has_items({"b": 1}, {"a": None})
