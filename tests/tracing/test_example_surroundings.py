"""What stands around a forward: torch's generator, hooks and calls of the root, modes that change weights, inputs."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, image, same
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import featx


class Doing(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.function(self.linear(x), *rest)


def in_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        noise = torch.rand(4)
    return x + noise


def seeded_behind(x: Tensor) -> Tensor:
    torch.manual_seed(4)
    return x


def put_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand(4)
    torch.set_rng_state(state)
    return x + noise


@pytest.mark.parametrize("function", [in_a_fork, seeded_behind, put_back])
def test_generator_that_forward_seeds_is_refused_and_put_back(function: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(Doing(function), nn.Dropout(), nn.Linear(4, 4))
    state = torch.get_rng_state()
    with pytest.raises(featx.TraceError, match="seeds torch's random generator"):
        featx.trace(model[0], image())
    assert torch.equal(torch.get_rng_state(), state)
    extractor = featx.create_feature_extractor(model, ["0", "2"], example_inputs=image())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    features = extractor(image())["2"]
    torch.manual_seed(7)
    assert torch.equal(features, model(image()))


@pytest.mark.parametrize("draw", [lambda: torch.empty(4).normal_(), lambda: nn.init.normal_(torch.zeros(4))])
def test_draw_into_a_tensor_of_forwards_own_is_drawn_anew_and_moves_no_generator(draw: Callable[[], Tensor]) -> None:
    model = Doing(lambda x: x + draw() + torch.rand(4))
    state = torch.get_rng_state()
    traced = featx.trace(model, image())
    assert torch.equal(torch.get_rng_state(), state)
    for seed in (1, 2):
        torch.manual_seed(seed)
        result = traced(image())
        torch.manual_seed(seed)
        assert torch.equal(result, model(image()))


@pytest.mark.parametrize("read", [lambda x: torch.from_dlpack(x) * 2, lambda x: x * x.untyped_storage()[0]])
def test_memory_that_is_read_past_torch_is_refused(read: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(featx.TraceError, match="accesses the storage"):
        featx.trace(Doing(lambda x: read(x.detach())), image())


def test_hooks_of_the_root_are_part_of_what_its_features_are_made_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.register_forward_hook(lambda module, args, output: output - 1)
    extractor = featx.create_feature_extractor(model, ["0"], example_inputs=image())
    x = torch.randn(5, 4)
    assert torch.equal(extractor(x)["0"], model[0](x * 3))
    assert torch.equal(featx.trace(model, image())(x), model(x))
    with pytest.raises(featx.TraceError, match="pre-hook"):
        featx.create_feature_extractor(model, ["0"], tracer="symbolic")


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_module_with_a_call_of_its_own_does_that_once() -> None:
    model = nn.Sequential(Calling(), nn.Tanh())
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=image())
    x = torch.randn(5, 4)
    assert torch.equal(extractor(x)["1"], model(x))
    with pytest.raises(featx.TraceError, match="overrides __call__"):
        featx.trace(Calling(), image())


class CallingUnfollowably(Calling):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + float(x.detach().numpy().max())


def test_module_with_a_call_of_its_own_is_never_one_node() -> None:
    with pytest.raises(featx.TraceError, match="numpy"):
        featx.trace(nn.Sequential(CallingUnfollowably(), nn.Tanh()), image())


class Merging(nn.Linear):
    """Adds something to its weight in eval mode, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.extra = nn.Parameter(torch.rand(4, 4))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.extra
            self.merged = not mode
        return self


def test_weights_that_a_mode_changes_are_as_before_to_the_last_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Merging(), nn.Tanh())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    featx.get_graph_node_names(model, example_inputs=image())
    extractor = featx.create_feature_extractor(model, ["0"], example_inputs=image())
    assert same(dict(model.state_dict()), before)
    assert not model[0].merged
    assert torch.equal(extractor(image())["0"], model[0](image()))


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ((torch.relu,), (torch.tanh,)),
        (([4, 2],), ([2, 4],)),
        (((1, 2),), ((1, 3),)),
        (({"scale": 2.0},), ({"scale": 3.0},)),
        ((Kind.ONE,), (Kind.TWO,)),
        ((torch.float32,), (torch.float64,)),
    ],
)
def test_input_that_is_no_tensor_must_stay_what_it_was(given: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    traced = featx.trace(Doing(lambda x, option: x * 2), image(), *given)
    x = torch.randn(5, 4)
    assert traced(x, *given).shape == (5, 4)
    with pytest.raises(featx.FeatxError, match=r"input 'rest\[0\]"):
        traced(x, *other)


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, (hidden, _) = self.lstm(packed)
        return pad_packed_sequence(output, batch_first=True)[0], hidden


@pytest.mark.slow
def test_packed_sequences_pass_through() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 2, 3])
    x = torch.randn(3, 5, 4)
    traced = agree(Packing(), (torch.randn(3, 5, 4), lengths), (x, lengths))
    for copied in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        for one, other in zip(copied(x, lengths), traced(x, lengths), strict=True):
            assert torch.equal(one, other)


class Unavailable:
    """Stands for an optional package that is not installed, as MONAI has them among its globals."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


UNAVAILABLE = Unavailable()


def test_globals_that_raise_at_any_question_are_not_asked() -> None:
    agree(Doing(lambda x: x + 1 if UNAVAILABLE else x), (image(),))


class WithHeads(nn.Module):
    """Sets the stride of a layer where it is moved, and never in forward, as models of ultralytics do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.dim() == 9:
                raise TypeError(layer.type)
            x = layer(x)
        return x

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        layer: Any = self.layers[-1]
        layer.stride = tuple(layer.stride)
        return super()._apply(fn, recurse)


def test_name_of_another_objects_attribute_is_not_taken_for_a_method_of_modules() -> None:
    agree(WithHeads(), (torch.rand(1, 3, 8, 8),))


def raises_itself(x: Tensor) -> Tensor:
    try:
        return x * 2
    except (IndexError, RuntimeError) as error:
        if x.numel() > 3:
            raise IndexError("too many") from error
        raise


def goes_on_for_one(x: Tensor) -> Tensor:
    try:
        y = x * 2
    except IndexError:
        raise
    except RuntimeError:
        y = x
    return y


def goes_on_inside(x: Tensor) -> Tensor:
    try:
        return x * 2
    except RuntimeError as error:
        try:
            raise ValueError from error
        except ValueError:
            return x


def test_try_whose_handlers_only_raise_catches_nothing() -> None:
    agree(Doing(raises_itself), (image(),))


@pytest.mark.parametrize("function", [goes_on_for_one, goes_on_inside])
def test_try_with_a_handler_that_goes_on_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(featx.TraceError, match="try"):
        featx.trace(Doing(function), image())


def test_requires_grad_is_that_of_the_real_tensor() -> None:
    model = Doing(lambda x: x[:, :2] * 2 if x[:, :2].requires_grad else x * 3)
    agree(model, (image(),), (torch.randn(5, 4),))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler, which looks at .grad
def test_condition_of_torch_is_one_node() -> None:
    model = Doing(lambda x: torch.cond(x.sum() > 0, lambda value: value * 2, lambda value: value - 1, (x,)))
    traced = agree(model, (image(),), (-image(),))
    assert traced.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)


def test_einops_through_its_module_leaves_sizes_free() -> None:
    einops = pytest.importorskip("einops")
    assert einops is EINOPS
    agree(Doing(split_heads), (image(),), (torch.randn(7, 4),))


try:
    import einops as EINOPS  # noqa: N812 - so that the test can say that it is this one
except ImportError:
    EINOPS = None


def split_heads(x: Tensor) -> Tensor:
    return EINOPS.rearrange(x, "b (h d) -> b h d", h=2)  # pyright: ignore[reportOptionalMemberAccess]
