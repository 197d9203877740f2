"""Models that keep something between calls find nothing of a trace in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx


class Caching(nn.Module):
    def __init__(self, look_up: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.by_size: dict[Any, torch.Tensor] = {}
        self.pairs: list[tuple[int, torch.Tensor]] = []
        self.seen: torch.Size | None = None
        self.look_up = look_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.look_up(self, x)


def made(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) * 2


def in_an_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.table is None or model.table.shape[0] != x.shape[1]:
        model.table = made(x.shape[1])
    return model.table


def in_a_new_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "other") or len(model.other) != x.shape[1]:
        model.other = made(x.shape[1])
    return model.other


def in_a_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    size = x.shape[1]
    if size not in model.by_size:
        model.by_size[size] = made(size)
    return model.by_size[size]


def in_a_dict_by_form(model: Any, x: torch.Tensor) -> torch.Tensor:
    key = (x.shape[1], x.dtype, x.device)
    if key not in model.by_size:
        model.by_size[key] = made(x.shape[1]).to(x.device)
    return model.by_size[key]


def in_a_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    for size, table in model.pairs:
        if size == x.shape[1]:
            return table
    model.pairs.append((x.shape[1], made(x.shape[1])))
    return model.pairs[-1][1]


def by_its_shape(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.seen != x.shape:
        model.seen, model.table = x.shape, made(x.shape[1])
    return model.table


CACHES = [in_an_attribute, in_a_new_attribute, in_a_dict, in_a_dict_by_form, in_a_list, by_its_shape]


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("look_up", CACHES)
def test_cache_in_an_attribute_is_not_poisoned_by_a_trace(look_up: Callable[..., torch.Tensor], is_warm: bool) -> None:
    model = Caching(look_up)
    if is_warm:
        model(image(2, 4))
    before = {name: copy.copy(value) for name, value in vars(model).items() if name[0] != "_"}
    for width in (4, 7, 4):
        x = image(2, width)
        traced = featx.trace(model, x)
        extractor = featx.create_feature_extractor(model, ["add"], example_inputs=x)
        assert same({name: value for name, value in vars(model).items() if name[0] != "_"}, before)
        assert same(traced(x), x + made(width))
        assert same(extractor(x)["add"], x + made(width))
    for width in (4, 7, 5):
        assert same(model(image(2, width)), image(2, width) + made(width))


@pytest.mark.parametrize("look_up", CACHES)
def test_cache_of_a_module_that_stays_whole_works_on(look_up: Callable[..., torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Caching(look_up), nn.Tanh())
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=image())
    twin = copy.deepcopy(model)
    for batch in (2, 5, 2):
        assert same(extractor(image(batch))["1"], model[0](image(batch)) + made(4))
        assert same(model(image(batch)), twin(image(batch)))


@pytest.mark.parametrize("look_up", CACHES)
def test_graph_of_a_model_that_caches_by_size_is_right_or_refused_at_every_size(
    look_up: Callable[..., torch.Tensor],
) -> None:
    model = Caching(look_up)
    model(image(2, 9))
    traced = featx.trace(model, image())
    for batch, width in ((2, 4), (5, 4), (2, 9), (3, 5), (1, 1)):
        try:
            result = traced(image(batch, width))
        except featx.SpecializationError:
            assert (batch, width) != (2, 4)
            continue
        assert same(result, image(batch, width) + made(width))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.features: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = self.linear(x)
        return self.features * 2


@pytest.mark.parametrize("is_warm", [False, True])
def test_model_that_keeps_a_feature_for_the_rest_of_its_call(is_warm: bool) -> None:
    model = Keeping()
    if is_warm:
        model(image(3))
    before = model.features
    traced = featx.trace(model, image())
    assert model.features is before
    assert same(traced(image(5)), model(image(5)))
    extractor = featx.create_feature_extractor(nn.Sequential(model, nn.Tanh()), ["1"], example_inputs=image())
    extractor(image(5))
    assert same(model.features, model.linear(image(5)))


class Recurrent(Keeping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.features is not None:
            y = y + self.features
        self.features = y
        return y


@pytest.mark.parametrize("is_warm", [False, True])
def test_model_that_keeps_a_feature_for_its_next_call_is_refused(is_warm: bool) -> None:
    model = Recurrent()
    if is_warm:
        model(image())
    before = model.features
    with pytest.raises(featx.TraceError, match="stores an input-dependent value in the attribute 'features'"):
        featx.trace(model, image())
    assert model.features is before


@functools.cache
def positions(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + positions(x.shape[1])


def test_cached_function_keyed_by_a_size_is_not_poisoned() -> None:
    positions.cache_clear()
    model = Remembering()
    traced = featx.trace(model, image())
    assert same(model(image()), image() + torch.arange(4.0))
    assert same(traced(image()), image() + torch.arange(4.0))
    assert not positions(4).is_meta
    assert type(positions(4)) is torch.Tensor


@functools.lru_cache
def half_and_scale(size: int, power: float = -0.5) -> tuple[int, float]:
    return size // 2, size**power


@functools.cache
def grid(height: int, width: int) -> torch.Tensor:
    return torch.arange(height * width, dtype=torch.float32).reshape(height, width)


class RememberingNumbers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, scale = half_and_scale(x.shape[1])
        return torch.cat([x[:, half:], x[:, :half]], 1) * scale + grid(*x.shape)


@pytest.mark.slow
def test_numbers_and_tensors_cached_by_sizes_are_the_same_again_and_again() -> None:
    model = RememberingNumbers()
    for width in (4, 6, 4, 8, 6):
        traced = agree(model, (image(2, width),), (image(2, width, seed=1),))
        for batch, other in ((2, 4), (2, 6), (5, width), (3, 7)):
            try:
                result = traced(image(batch, other))
            except featx.SpecializationError:
                continue
            assert same(result, model(image(batch, other)))
    assert half_and_scale(4) == (2, 0.5)
    assert type(half_and_scale(6)[0]) is int
    assert not grid(2, 4).is_meta


def test_einops_can_be_traced_again_and_again() -> None:
    einops = pytest.importorskip("einops")

    class Rearranging(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = einops.rearrange(x, "b (h w) -> b w h", h=2)
            return einops.rearrange(y, "b w h -> (b w) h") * 2

    model = Rearranging()
    for seed in range(3):
        agree(model, (image(2, 6),), (image(2, 6, seed=seed),))
    assert same(model(image(5, 8)), featx.trace(model, image(5, 8))(image(5, 8)))


class ImportsInForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from einops import rearrange

        return rearrange(rearrange(x, "b c h w -> b (h w) c").relu(), "b (h w) c -> b c h w", h=x.shape[2])


def test_einops_may_be_imported_within_a_function() -> None:
    pytest.importorskip("einops")
    traced = featx.trace(ImportsInForward(), torch.randn(2, 3, 8, 8))
    for x in (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 10, 6)):
        assert torch.equal(traced(x), ImportsInForward()(x))


@pytest.mark.slow
def test_every_function_and_layer_of_einops_gives_the_same_again_and_again() -> None:
    einops = pytest.importorskip("einops")
    layers = pytest.importorskip("einops.layers.torch")

    class Vision(nn.Module):
        """As vit-pytorch writes them."""

        def __init__(self) -> None:
            super().__init__()
            self.patches = layers.Rearrange("b (h p) (w q) -> b (h w) (p q)", p=2, q=2)
            self.embed = nn.Linear(4, 4)
            self.token = nn.Parameter(torch.randn(1, 1, 4))
            self.pool = layers.Reduce("b n d -> b d", "mean")

        def forward(self, x: torch.Tensor) -> Any:
            x = self.embed(self.patches(x))
            x = torch.cat([einops.repeat(self.token, "1 1 d -> b 1 d", b=x.shape[0]), x], 1)
            heads = einops.rearrange(x, "b n (h d) -> b h n d", h=2)
            scores = einops.einsum(heads, heads, "b h i d, b h j d -> b h i j")
            packed, shapes = einops.pack([x, x * 2], "b * d")
            first, _ = einops.unpack(packed, shapes, "b * d")
            return self.pool(x), scores, first, einops.reduce(x, "b n d -> b d", "max")

    model = Vision()
    for batch, size in ((2, 4), (3, 8), (2, 4)):
        example, other = torch.rand(batch, size, size), torch.rand(batch, size, size)
        agree(model, (example,), (other,))
        extractor = featx.create_feature_extractor(model, ["patches", "pool"], example_inputs=example)
        patches = model.patches(other)
        assert same(extractor(other), {"patches": patches, "pool": model(other)[0]})


class Rotates(nn.Module):
    """Keeps a table that grows, and how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.rand(4))
        self.longest, self.table = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.table: Any = torch.outer(torch.arange(self.longest).float(), self.steps).cos()
        return x * self.table[: x.shape[1]]


class RotatesTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rotation = nn.Linear(4, 4), Rotates()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotation(self.linear(x)) + self.rotation(x)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_table_that_grows_in_several_layers_is_followed(layers: int) -> None:
    model = nn.Sequential(*[RotatesTwice() for _ in range(layers)])
    traced = featx.trace(model, torch.rand(2, 5, 4))
    for length in (5, 3, 9):
        x = torch.rand(3, length, 4)
        assert torch.equal(traced(x), model(x))


class SetsAnOption(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(kind=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "first"
        return x * 2


def test_option_that_the_first_call_sets_and_no_later_call_changes_is_followed() -> None:
    model, x = SetsAnOption(), torch.rand(2)
    traced = featx.trace(model, x)
    assert model.config.kind is None
    assert torch.equal(traced(x), model(x))


class CountsInAnOption(SetsAnOption):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.kind = 1 + (self.config.kind or 0)
        return x * 2 if self.config.kind < 100 else x


def test_refusal_names_the_option_that_forward_changes_in_each_call() -> None:
    with pytest.raises(featx.TraceError, match=r"attribute 'config\.kind'"):
        featx.trace(CountsInAnOption(), torch.rand(2))


class Biased(nn.Module):
    """Keeps what it has indexed of its weights in a dict, from its first call in eval mode on, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.rand(3, 5))
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.split([2, 2], 1)[0] * 2
        if "bias" not in self.cache:
            self.cache["bias"] = (self.biases[:, [0, 2]] + 1)[1]
        return scaled.split([1, 1], 1)[0] + self.cache["bias"]


@pytest.mark.slow
def test_each_name_of_a_model_that_fills_a_cache_can_be_asked_for() -> None:
    model, x = Biased().eval(), torch.rand(3, 4)
    _, names = featx.get_graph_node_names(model, example_inputs=x)
    indexed = model.biases[:, [0, 2]]
    scaled = x[:, :2] * 2
    expected = {
        "split": x.split([2, 2], 1), "getitem": x[:, :2], "mul": scaled, "biases": model.biases, "getitem_1": indexed,
        "add": indexed + 1, "getitem_2": (indexed + 1)[1], "split_1": scaled.split([1, 1], 1),
        "getitem_3": scaled[:, :1], "add_1": scaled[:, :1] + (indexed + 1)[1],
    }  # fmt: skip
    asked = [name for name in names if name in expected]
    assert set(asked) == set(expected)
    for request in (asked, *([name] for name in asked)):
        found = featx.create_feature_extractor(Biased().eval(), request, example_inputs=x)
        found.load_state_dict(model.state_dict(), strict=False)
        for name, value in found(x).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


class CachedMask(nn.Module):
    """A mask by size in a dict, whose key fixes the size; the last call returns a padded map without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.masks: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, rows, columns, _ = x.shape
        x = nn.functional.pad(x, (0, 0, 0, -columns % 4, 0, -rows % 4))
        _, height, width, _ = x.shape
        if (height, width) not in self.masks:
            self.masks[height, width] = torch.arange(height * width).view(height, width, 1) / 100
        x = self.linear(x) + self.masks[height, width]
        return x[:, :rows, :columns].contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("names", [["0.linear"], ["output"], ["0.linear", "1.linear", "output"], ["1.linear", "0"]])
def test_output_behind_a_cache_by_size_can_be_requested(names: list[str]) -> None:
    model, x = nn.Sequential(CachedMask(), CachedMask()).eval(), torch.rand(1, 9, 7, 4)
    extractor = featx.create_feature_extractor(model, names, example_inputs=x)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        module = model.get_submodule("" if name == "output" else name)
        module.register_forward_hook(lambda _, args, output, name=name: found.__setitem__(name, output))
    model(x)
    features = extractor(x)
    assert all(torch.equal(features[name], found[name]) for name in names)


def _compiled(width: int, dtype: torch.dtype, default: torch.dtype) -> torch.Tensor:
    return torch.ones(width) if dtype is default else torch.ones(width, dtype=dtype)


class ComparesWhileItCompiles(nn.Module):
    """Looks for shared inputs in the first call alone, as einx does when it compiles an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compiled: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if "scale" not in self.compiled:
            self.compiled["scale"] = _compiled(x.shape[-1], torch.float32, torch.get_default_dtype())
        return self.linear(x * self.compiled["scale"] + y)


def test_a_comparison_in_the_first_call_alone() -> None:
    torch.manual_seed(0)
    model, inputs = ComparesWhileItCompiles().eval(), (torch.rand(2, 4), torch.rand(2, 4))
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=inputs)
    for x, y in (inputs, (torch.rand(3, 4), torch.rand(3, 4))):
        assert torch.equal(extractor(x, y)["linear"], model(x, y))
