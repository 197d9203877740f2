"""What forward does besides computing: to state, gradients and switches; and what it asks of inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import featx

X = torch.rand(2, 4)


class Pooled(nn.Module):
    """Pools over a dimension that an input has or has not."""

    def __init__(self, rank: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.body, self.head, self.rank = nn.Linear(4, 4), nn.Linear(4, 2), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.rank(x) == 3:
            x = x.mean(1)
        return self.head(x)


@pytest.mark.parametrize("rank", [lambda x: x.ndim, lambda x: x.dim(), lambda x: x.ndimension()])
def test_rank_that_forward_goes_by_is_checked(rank: Callable[[torch.Tensor], int]) -> None:
    model, other = Pooled(rank), torch.rand(2, 5, 4)
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=X)
    assert torch.equal(extractor(X)["head"], model(X))
    with pytest.raises(featx.SpecializationError, match="3 dimensions now, 2 on the example"):
        extractor(other)
    adaptive = featx.create_feature_extractor(model, ["head"], example_inputs=X, adaptive=True)
    assert torch.equal(adaptive(other)["head"], model(other))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return self.body(x * 2 if weight is None else x) * (1 if weight is None else weight)


@pytest.mark.parametrize("other", [None, 3.0, np.float32(2)], ids=["None", "a number", "of numpy"])
def test_input_that_was_a_tensor_has_to_be_one(other: Any) -> None:
    extractor = featx.create_feature_extractor(Weighted(), ["body"], example_inputs=(X, torch.tensor(2.0)))
    with pytest.raises(featx.SpecializationError, match="a tensor on the example"):
        extractor(X, other)


class Averaged(nn.Module):
    def forward(self, x: torch.Tensor, weights: Any) -> torch.Tensor:
        return x * weights.mean()


def test_input_that_was_an_array_may_not_be_a_tensor() -> None:
    traced = featx.trace(Averaged(), X, np.ones(4, dtype=np.float32))
    with pytest.raises(featx.SpecializationError, match="an array of numpy"):
        traced(X, torch.ones(4))


class Queue(nn.Module):
    """Keeps the last keys in a ring, as contrastive learning does, after the feature that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.logits = nn.Linear(4, 4), nn.Identity()
        self.register_buffer("queue", torch.randn(4, 6))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.encode(x)
        found = self.logits(keys @ self.queue.clone())
        start = int(self.position)
        self.queue[:, start : start + len(x)] = keys.detach().T
        self.position[0] = (start + len(x)) % 6
        return found


class Centered(nn.Module):
    """Writes its mean after a check of values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centered, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.centered(self.body(x) - self.center)
        z = self.last(y)
        if z.isnan().any():
            raise ValueError("nan")
        self.center += y.detach().mean(0)
        return z


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(Queue, "logits"), (Centered, "centered")])
def test_state_is_written_behind_the_last_wanted_value_too(kind: type[nn.Module], name: str) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, [name], example_inputs=X)
    for _ in range(4):
        seen: list[torch.Tensor] = []
        hook = twin.get_submodule(name).register_forward_hook(lambda *call: seen.append(call[2].clone()))  # noqa: B023
        twin(X)
        hook.remove()
        assert torch.equal(extractor(X)[name], seen[0])


SEEN = torch.zeros(4)
TABLES: dict[str, torch.Tensor] = {}


class Outside(Centered):
    """Writes into globals of its file too, where no trace follows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.centered(self.body(x) - self.center)
        if y.isnan().any():
            raise ValueError("nan")
        SEEN.add_(y.detach().mean(0))
        TABLES["last"] = y.detach()
        raise ValueError("after all that is wanted")


def test_search_for_writes_leaves_globals_and_the_generator() -> None:
    model = Outside()
    state = torch.get_rng_state()
    featx.create_feature_extractor(model, ["centered"], example_inputs=X)
    assert torch.equal(SEEN, torch.zeros(4))
    assert not TABLES
    assert torch.equal(torch.get_rng_state(), state)


class Untraceable(Centered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.centered(self.body(x) - self.center)
        self.center += torch.from_numpy(y.detach().numpy()).mean(0)
        return self.last(y)


@pytest.mark.slow
def test_state_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="numpy"):
        featx.create_feature_extractor(Untraceable(), ["centered"], example_inputs=X)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> Any:
        return self.head(self.encode(one)), self.encode(other)


def test_second_call_of_a_module_writes_its_statistics() -> None:
    model = Siamese().train()
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["encode.0", "head"], example_inputs=(X, X + 3)).train()
    extractor(X, X + 3), twin(X, X + 3)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


class Scaled(nn.Module):
    """Scales a gradient with a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.1)
        return self.other(y)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.one(x)
        y += x
        return y, x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Overwriting(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.block(x)
        return self.other(y)


def gradient(output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(output.sum(), source, retain_graph=True)[0]


def test_hook_on_a_tensor_scales_its_gradient() -> None:
    model = Scaled()
    extractor = featx.create_feature_extractor(model, ["other"], example_inputs=X)
    weight = model.one.weight
    assert torch.equal(gradient(extractor(X)["other"], weight), gradient(model(X), weight))


def test_gradients_of_a_feature_that_is_overwritten_and_returned_in_a_tuple() -> None:
    model = Block()
    values = featx.create_feature_extractor(model, ["block", "block.one", "other"], example_inputs=X)(X)
    assert torch.equal(gradient(values["other"], values["block.one"]), model.other.weight.sum(0).expand(2, 4))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y.detach_()
        return y * 2


def test_feature_that_is_detached_later_has_its_gradients() -> None:
    model = Detached()
    values = featx.create_feature_extractor(model, ["one", "mul"], example_inputs=X)(X)
    assert values["one"].requires_grad
    assert not values["mul"].requires_grad


class Writing(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one.mul_(2)
        return other + 1


@pytest.mark.slow
def test_one_tensor_as_two_inputs_of_which_one_is_written() -> None:
    extractor = featx.create_feature_extractor(Writing(), ["add"], example_inputs=(X.clone(), X.clone()))
    assert torch.equal(extractor(X.clone(), X)["add"], X + 1)
    with pytest.raises(featx.SpecializationError, match="two inputs"):
        extractor(X, X)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * (2 if self.one.weight.requires_grad else 3)


def test_parameter_that_is_frozen_later() -> None:
    model = Frozen()
    traced = featx.trace(model, X)
    assert torch.equal(traced(X), model(X))
    model.requires_grad_(False)
    with pytest.raises(featx.SpecializationError, match="requires_grad"):
        traced(X)


class Doing(nn.Module):
    """Does something around its layer."""

    def __init__(self, action: Callable[[Doing, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.action = nn.Linear(4, 4), action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.action(self, x)


def hook_for_a_while(model: Doing, x: torch.Tensor) -> torch.Tensor:
    hook = model.one.register_forward_hook(lambda module, inputs, output: output - 5)
    y = model.one(x)
    hook.remove()
    return y


def default_dtype(model: Doing, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    y = torch.full((4,), 0.1)
    torch.set_default_dtype(torch.float32)
    return model.one(x) + y


def deterministic(model: Doing, x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    y = model.one(x).cumsum(0)
    torch.use_deterministic_algorithms(False)
    return y


def cached_parametrizations(model: Doing, x: torch.Tensor) -> torch.Tensor:
    with parametrize.cached():
        return model.one(model.one(x))


def saved_in_half(model: Doing, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.float()):
        return model.one(x).sigmoid()


def gradients_in_forward(model: Doing, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        model.one(x).pow(2).sum().backward()
    return model.one(x)


def hook_on_a_parameter(model: Doing, x: torch.Tensor) -> torch.Tensor:
    model.one.weight.register_hook(lambda gradient: gradient * 2)
    return model.one(x)


def clip(model: Doing, x: torch.Tensor) -> torch.Tensor:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return model.one(x)


def try_again(model: Doing, x: torch.Tensor) -> torch.Tensor:
    try:
        return model.one(x)
    except RuntimeError:
        return model.one(x[..., :4])


def default_device(model: Doing, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_device("meta")
    length = torch.zeros(4).shape[0]
    torch.set_default_device(None)
    return model.one(x) + length


class DoingInside(nn.Module):
    """Calls code that does something from a submodule, which could be kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doing(default_device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize("kind", [lambda: Doing(default_device), DoingInside])
def test_default_device_that_forward_sets_is_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(featx.TraceError, match="set_default_device, which reorders"):
        featx.trace(kind(), X)
    assert torch._C._len_torch_function_stack() == 0
    assert torch.zeros(2).device.type == "cpu"


def warn_only(model: Doing, x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True, warn_only=False)
    return model.one(x)


def test_deterministic_algorithms_are_those_of_before_to_the_warning() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(featx.TraceError, match="deterministic algorithms"):
            featx.trace(Doing(warn_only), X)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


ACTIONS = [
    hook_for_a_while, default_dtype, deterministic, cached_parametrizations, saved_in_half, gradients_in_forward,
    hook_on_a_parameter, clip, try_again,
]  # fmt: skip


@pytest.mark.parametrize("action", ACTIONS)
def test_what_no_graph_does_is_refused_and_leaves_nothing(action: Callable[[Doing, torch.Tensor], Any]) -> None:
    model = Doing(action)
    if action is cached_parametrizations:
        parametrizations.spectral_norm(model.one)
    if action is hook_for_a_while:
        model.one.register_forward_hook(lambda *call: None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(featx.TraceError):
        featx.trace(model, X)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters() if parameter.grad is not None)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.slow
def test_gradients_inside_a_module_that_is_kept_whole_are_those_of_a_copy() -> None:
    model = nn.Sequential(Doing(gradients_in_forward), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=X)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(extractor(X)["1"], model(X))


class Stores(nn.Module):
    def __init__(self, store: list[torch.Tensor]) -> None:
        super().__init__()
        self.store, self.one = store, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        self.store.append(y)
        return y * 2


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.store: list[torch.Tensor] = []
        self.inner = Stores(self.store)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store.clear()
        y = self.inner(x) + self.store[0]
        self.store.clear()
        return y


class Hands(nn.Module):
    """Hands a value on to its submodule in a list that both have."""

    def __init__(self, is_cleared: bool) -> None:
        super().__init__()
        self.store: list[torch.Tensor] = [torch.zeros(1)]
        self.one, self.inner, self.is_cleared = nn.Linear(4, 4), Takes(self.store), is_cleared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if self.is_cleared:
            self.store.clear()
            self.store.append(y)
        else:
            self.store[0] = y
        return self.inner(x)


class Takes(nn.Module):
    def __init__(self, store: list[torch.Tensor]) -> None:
        super().__init__()
        self.store, self.one = store, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.store[0]


class TakesByName(Takes):
    """Reads the list in a way that no trace of it follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + torch.func.vmap(torch.neg)(self.store[0])


@pytest.mark.slow
@pytest.mark.parametrize("make", [Reads, lambda: Hands(True), lambda: Hands(False)])
def test_list_that_two_modules_share_is_followed(make: Callable[[], nn.Module]) -> None:
    model = make()
    for x in (X, X + 1):
        assert torch.equal(featx.trace(make_like(model), X)(x), make_like(model)(x))
        for nodes in (["output"], ["inner"], ["inner.one", "output"]):
            extractor = featx.create_feature_extractor(make_like(model), nodes, example_inputs=X)
            expected = outputs_seen_by_hooks(make_like(model), nodes, x)
            found = extractor(x)
            assert all(torch.equal(found[name], expected[name]) for name in nodes)


def outputs_seen_by_hooks(model: nn.Module, nodes: list[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    for name in nodes:
        path = "" if name == "output" else name
        model.get_submodule(path).register_forward_hook(lambda *call, key=name: seen.update({key: call[-1]}))
    model(x)
    return seen


def make_like(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.mark.parametrize("is_cleared", [True, False])
def test_list_that_a_module_which_stays_whole_reads_is_refused(is_cleared: bool) -> None:
    model = Hands(is_cleared)
    model.inner = TakesByName(model.store)
    with pytest.raises(featx.TraceError, match="'inner', which is kept whole"):
        featx.trace(model, X)
