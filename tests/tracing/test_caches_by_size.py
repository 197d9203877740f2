"""Models that keep what they have computed for a size, and find it by that size in a later call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from agreement import same
from torch import nn
from torch.distributions import Normal

import featx

Build = Callable[[Any, Any, Any], torch.Tensor]


def ramp(h: int, w: int) -> torch.Tensor:
    return torch.arange(h * w).reshape(h, w) / (h + w)


def caching(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that keeps the cached function in a closure, as that of transformers does (DETR)."""
    cached = functools.lru_cache(maxsize=1)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return cached(*args)

    return wrapper


class Keeping(nn.Module):
    """Adds a table to a map, which `find` looks up or makes for height and width."""

    def __init__(self, find: Build) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.cache: dict[Any, torch.Tensor] = {}
        self.caches: list[dict[Any, torch.Tensor]] = [{} for _ in range(33)]
        self.table: torch.Tensor | None = None
        self.height = 0
        self.find = find
        self.out = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.out(x + self.find(self, x.shape[-2], x.shape[-1]))

    @functools.lru_cache(maxsize=8)  # noqa: B019 - as people write it
    def cached(self, h: int, w: int) -> torch.Tensor:
        return ramp(h, w)

    @caching
    def cached_in_a_closure(self, h: int, w: int) -> torch.Tensor:
        return ramp(h, w)

    @staticmethod
    @caching
    def cached_without_self(h: int, w: int) -> torch.Tensor:
        return ramp(h, w)


def by_tuple(model: Any, h: int, w: int) -> torch.Tensor:
    key = (h, w)
    if key not in model.cache:
        model.cache[key] = ramp(h, w)
    return model.cache[key]


def by_tuple_of_new_reads(model: Any, h: int, w: int) -> torch.Tensor:
    """As SAM 2 does."""
    key = (h, w)
    if key in model.cache:
        return model.cache[key]
    model.cache[h, w] = ramp(h, w)
    return model.cache[(h, w)]


def by_text(model: Any, h: int, w: int) -> torch.Tensor:
    key = f"{h}x{w}"
    if key not in model.cache:
        model.cache[key] = ramp(h, w)
    return model.cache[key]


def by_joined_text(model: Any, h: int, w: int) -> torch.Tensor:
    return model.cache.setdefault("_".join([str(h), str(w)]), ramp(h, w))


def by_product(model: Any, h: int, w: int) -> torch.Tensor:
    found = model.cache.get(h * 1000 + w)
    if found is None:
        found = model.cache[h * 1000 + w] = ramp(h, w)
    return found


def by_cached_method(model: Any, h: int, w: int) -> torch.Tensor:
    return model.cached(h, w)


def by_method_with_a_decorator(model: Any, h: int, w: int) -> torch.Tensor:
    return model.cached_in_a_closure(h, w)


def by_static_method_with_a_decorator(model: Any, h: int, w: int) -> torch.Tensor:
    return model.cached_without_self(h, w)


def in_a_dict_of_one_call(model: Any, h: int, w: int) -> torch.Tensor:
    tables: dict[Any, torch.Tensor] = {}
    for _ in range(2):
        if (h, w) not in tables:
            tables[h, w] = ramp(h, w)
    return tables[h, w]


def in_one_of_many_caches(model: Any, h: int, w: int) -> torch.Tensor:
    return by_tuple(SimpleNamespace(cache=model.caches[20]), h, w)


def for_several_levels(model: Any, h: int, w: int) -> torch.Tensor:
    levels = [by_tuple(model, h // divisor, w // divisor) for divisor in (1, 2, 3)]
    return levels[0] + sum(level.sum() for level in levels)


def by_module_and_sizes(model: Any, h: int, w: int) -> torch.Tensor:
    """For several levels, with items in the keys that are no numbers."""
    tables = []
    for owner, divisor in ((model, 1), (model, 2), (model.out, 2)):
        key = (owner, "table", h // divisor, w // divisor, torch.float32)
        if key not in model.cache:
            model.cache[key] = ramp(h // divisor, w // divisor)
        tables.append(model.cache[key])
    return tables[0] + tables[1].sum() + tables[2].sum()


def where_the_height_differs(model: Any, h: int, w: int) -> torch.Tensor:
    if model.height != h or model.table is None or model.table.shape[1] != w:
        model.height, model.table = h, ramp(h, w)
    return model.table


BY_SIZE: list[Build] = [
    by_tuple, by_tuple_of_new_reads, by_text, by_joined_text, by_product, by_cached_method, by_method_with_a_decorator,
    by_static_method_with_a_decorator, in_a_dict_of_one_call, in_one_of_many_caches, for_several_levels,
    by_module_and_sizes, where_the_height_differs,
]  # fmt: skip
SHAPES = [(2, 3, 8, 10), (1, 3, 8, 10), (2, 3, 8, 12), (2, 3, 12, 10), (2, 3, 10, 8), (3, 3, 16, 16), (2, 3, 3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("find", BY_SIZE)
def test_sizes_that_are_keys_of_a_cache_alone_are_free(find: Build) -> None:
    model = Keeping(find).eval()
    extractor = featx.create_feature_extractor(model, ["out"], example_inputs=torch.rand(SHAPES[0]))
    assert model.cache == {}
    assert model.height == 0
    for shape in SHAPES * 2:
        x = torch.rand(shape)
        assert same(extractor(x)["out"], model(x))


def test_closures_of_a_decorator_hold_what_they_held() -> None:
    model = Keeping(by_static_method_with_a_decorator).eval()
    (cell,) = cast(Any, Keeping.cached_without_self).__closure__
    before = cell.cell_contents
    before.cache_clear()
    featx.create_feature_extractor(model, ["out"], example_inputs=torch.rand(SHAPES[0]))
    assert cell.cell_contents is before
    assert before.cache_info().currsize == 0


def for_the_first_size(model: Any, h: int, w: int) -> torch.Tensor:
    if model.table is None:
        model.table = ramp(h, w).sum()
    return model.table


def by_height_alone(model: Any, h: int, w: int) -> torch.Tensor:
    if h not in model.cache:
        model.cache[h] = ramp(h, w).sum()
    return model.cache[h]


def where_the_height_alone_differs(model: Any, h: int, w: int) -> torch.Tensor:
    if model.height != h:
        model.height, model.table = h, ramp(h, w).sum()
    return model.table


STALE: dict[Build, list[tuple[int, ...]]] = {
    for_the_first_size: [(2, 3, 8, 12), (2, 3, 12, 10)],
    by_height_alone: [(2, 3, 8, 12)],
    where_the_height_alone_differs: [(2, 3, 8, 12)],
}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("find", STALE)
def test_sizes_for_which_a_cache_holds_what_was_computed_for_others_are_refused(find: Build, adaptive: bool) -> None:
    model = Keeping(find).eval()
    extractor = featx.create_feature_extractor(model, ["out"], example_inputs=torch.rand(SHAPES[0]), adaptive=adaptive)
    for shape in (SHAPES[0], (5, 3, 8, 10)):
        x = torch.rand(shape)
        assert same(extractor(x)["out"], model(x))
    for shape in STALE[find]:
        assert not same(model(torch.ones(shape)), Keeping.forward(_fresh(model), torch.ones(shape)))
        with pytest.raises(featx.SpecializationError, match=r"a cache for|first call|'height'"):
            extractor(torch.rand(shape))


def _fresh(model: Keeping) -> Keeping:
    fresh = Keeping(model.find).eval()
    fresh.load_state_dict(model.state_dict())
    return fresh


def where_the_text_is_known(model: Any, h: int, w: int) -> torch.Tensor:
    return ramp(h, w) * (2 if f"{h}x{w}" == "12x10" else 1)


def where_another_key_is_known(model: Any, h: int, w: int) -> torch.Tensor:
    return ramp(h, w) * {"12x10": 2.0}.get(f"{h}x{w}", 1.0)


def where_the_text_goes_elsewhere(model: Any, h: int, w: int) -> torch.Tensor:
    key = f"{h}x{w}"
    if key not in model.cache:
        model.cache[key] = ramp(h, w)
    return model.cache[key] * (2 if key.startswith("12") else 1)


def where_the_dict_was_filled(model: Any, h: int, w: int) -> torch.Tensor:
    known = {12: torch.tensor(2.0)}
    return ramp(h, w) * known.get(h, torch.tensor(1.0))


def where_a_key_is_known_later(model: Any, h: int, w: int) -> torch.Tensor:
    key = f"{h}x{w}"
    model.cache["12x10"] = torch.tensor(2.0)
    return ramp(h, w) * model.cache.get(key, torch.tensor(1.0))


def where_a_local_dict_knows_it(model: Any, h: int, w: int) -> torch.Tensor:
    known: dict[str, float] = {}
    key = f"{h}"
    known["12"] = 2.0
    return ramp(h, w) * known.get(key, 1.0)


@pytest.mark.parametrize(
    "find",
    [
        where_a_key_is_known_later,
        where_a_local_dict_knows_it,
        where_the_text_is_known,
        where_another_key_is_known,
        where_the_text_goes_elsewhere,
        where_the_dict_was_filled,
    ],
)
def test_keys_that_tell_one_size_from_others_fix_it(find: Build) -> None:
    model = Keeping(find).eval()
    extractor = featx.create_feature_extractor(model, ["out"], example_inputs=torch.rand(SHAPES[0]))
    assert same(extractor(torch.ones(SHAPES[0]))["out"], model(torch.ones(SHAPES[0])))
    with pytest.raises(featx.SpecializationError):
        extractor(torch.rand(2, 3, 12, 10))


class Rotary(nn.Module):
    """Keeps cosines of angles for the longest text so far, as language models of 2023 do."""

    def __init__(self, length: int, *, scales: bool = False) -> None:
        super().__init__()
        self.scales = scales
        self.register_buffer("frequencies", 0.1 ** torch.arange(8), persistent=False)
        self.fill(length)

    def fill(self, length: int) -> None:
        self.longest = length
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies)
        self.register_buffer("cosines", (angles / length if self.scales else angles).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.longest:
            self.fill(x.shape[1])
        return x * self.cosines[: x.shape[1]]


class Text(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.rotary = rotary

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rotary(self.embedding(ids)).relu()


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 20, (2, length))


@pytest.mark.slow
def test_table_that_grows_is_as_long_as_needed() -> None:
    model = Text(Rotary(4)).eval()
    extractor = featx.create_feature_extractor(model, ["rotary.mul"], example_inputs=ids(10))
    for length in (10, 7, 30, 12):
        x = ids(length)
        assert same(extractor(x)["rotary.mul"].relu(), model(x))


@pytest.mark.slow
def test_table_that_differs_where_it_has_grown_fixes_the_length() -> None:
    model = Text(Rotary(4, scales=True)).eval()
    extractor = featx.create_feature_extractor(model, ["rotary.mul"], example_inputs=ids(10))
    x = ids(10)
    assert same(extractor(x)["rotary.mul"].relu(), model(x))
    with pytest.raises(featx.SpecializationError):
        extractor(ids(7))


class RotaryOfLastLength(nn.Module):
    """Keeps them for the length of the last text, and asks for that only if there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.cosines: torch.Tensor | None = None
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cosines is None or x.shape[1] > self.length:
            self.length = x.shape[1]
            self.cosines = torch.outer(torch.arange(self.length), 0.1 ** torch.arange(8)).cos()
        return x * self.cosines[: x.shape[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotary.mul", "relu"])
def test_length_that_only_a_later_call_reads_is_followed(name: str) -> None:
    model = Text(RotaryOfLastLength()).eval()
    extractor = featx.create_feature_extractor(model, [name], example_inputs=ids(10))
    for length in (10, 7, 30, 12):
        x = ids(length)
        assert same(extractor(x)[name].relu(), model(x))


class Doubling(nn.Module):
    """Doubles its input if the last one was long."""

    def __init__(self, is_long: Callable[[int], bool]) -> None:
        super().__init__()
        self.length = 0
        self.is_long = is_long

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if self.is_long(self.length) else x
        self.length = x.shape[1]
        return y + self.length


@pytest.mark.parametrize(
    "is_long",
    [lambda n: n > 100, lambda n: n * 2 - 1 > 100, lambda n: f"{n}" == "120", lambda n: n in (120, 130)],
)
def test_kept_length_that_decides_alone_fixes_the_length(is_long: Callable[[int], bool]) -> None:
    model = Doubling(is_long)
    traced = featx.trace(model, torch.ones(1, 3))
    for _ in range(2):
        assert same(traced(torch.ones(1, 3)), model(torch.ones(1, 3)))
    with pytest.raises(featx.SpecializationError):
        traced(torch.ones(1, 120))


class KeepsAResult(nn.Module):
    """A module that returns what it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.kept = torch.zeros(0, 1)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        if length != self.length:
            self.length, self.kept = length, torch.arange(length, device=x.device)[:, None] * 0.5
        return self.kept


class UsesAResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeps = KeepsAResult()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.keeps(x, x.shape[1])
        return self.relu(x + kept if kept.shape[0] > 1 else x)


def test_module_that_is_kept_whole_may_return_what_it_has_kept() -> None:
    model = UsesAResult()
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=torch.rand(2, 5, 3))
    for length in (5, 4, 9, 5):
        x = torch.randn(2, length, 3)
        assert same(extractor(x)["relu"], model(x))


class CountingBeside(Keeping):
    """Counts its calls in a buffer, of which a graph writes what the model writes, beside a cache."""

    def __init__(self, find: Build) -> None:
        super().__init__(find)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("offset", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[:1] += 1
        self.offset.mul_(1.5)
        return super().forward(x) + self.calls.sum() * self.offset


@pytest.mark.slow
@pytest.mark.parametrize("find", [by_tuple, where_the_height_differs])
def test_model_with_a_cache_and_a_counter_is_only_read(find: Build) -> None:
    model = CountingBeside(find).eval()
    traced = featx.trace(model, torch.rand(SHAPES[0]))
    assert model.calls.tolist() == [0.0, 0.0]
    assert model.offset.item() == 1.0
    twin = copy.deepcopy(model)
    for shape in SHAPES:
        x = torch.rand(shape)
        assert same(traced(x), twin(x))


class Sampler:
    """Keeps what it has drawn for a later question, which forward does not ask, as that of stable-baselines3."""

    def sample(self, mean: torch.Tensor, how: str) -> torch.Tensor:
        self.distribution = Normal(mean, torch.ones_like(mean))
        if how == "a distribution":
            self.drawn = self.distribution.rsample()
        elif how == "a view":
            noise = torch.zeros(mean.shape[0] * mean.shape[1])
            noise.view(mean.shape).normal_()
            self.drawn = mean + noise.view(mean.shape)
        else:
            self.drawn = torch.empty(mean.shape).copy_(mean).mul_(2)
        return torch.tanh(self.drawn)


class Samples(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.mean, self.sampler, self.how = nn.Linear(4, 2), Sampler(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sampler.sample(self.mean(x), self.how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a distribution", "a view", "of the input"])
def test_what_a_model_keeps_and_does_not_read_fixes_no_size(how: str) -> None:
    torch.manual_seed(0)
    model = Samples(how).eval()
    extractor = featx.create_feature_extractor(model, ["mean", "output"], example_inputs=torch.rand(2, 4))
    for rows in (2, 3, 5):
        x = torch.rand(rows, 4)
        torch.manual_seed(rows)
        found = extractor(x)
        torch.manual_seed(rows)
        assert torch.equal(found["output"], model(x))
        assert torch.equal(found["mean"], model.mean(x))


class KeepsWrittenNoise(nn.Module):
    """Draws a table for the first length, writes the first input into it, and adds it in all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table: Any = torch.zeros(x.shape[0], 4)
            self.table.add_(1)
        return self.linear(x) + self.table[: x.shape[0]].sum(0)


def test_table_of_the_first_length_that_is_written_is_not_taken_for_that_of_another() -> None:
    torch.manual_seed(0)
    extractor = featx.create_feature_extractor(KeepsWrittenNoise().eval(), ["output"], example_inputs=torch.rand(4, 4))
    with pytest.raises(featx.SpecializationError):
        extractor(torch.rand(6, 4))


class WindowMask(nn.Module):
    """Keeps a mask for the last length, and reads how long that is, as attention in windows does."""

    def __init__(self, length_of: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.length: int | None = None
        self.mask: torch.Tensor | None = None
        self.length_of = length_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.length != x.shape[1]:
            self.length = x.shape[1]
            self.mask = torch.arange(self.length * 4).reshape(self.length, 4) / 7
        assert self.mask is not None
        windows = self.length_of(self.mask)
        return x.reshape(-1, windows, 4) + self.mask


@pytest.mark.slow
@pytest.mark.parametrize(
    "length_of", [lambda mask: mask.shape[0], lambda mask: mask.size(0), lambda mask: mask.size()[0]]
)
def test_lengths_of_what_is_kept_for_a_size_are_followed(length_of: Callable[[torch.Tensor], int]) -> None:
    model = WindowMask(length_of).eval()
    extractor = featx.create_feature_extractor(model, ["layer", "output"], example_inputs=torch.rand(1, 8, 4))
    assert extractor.free_dims.of["x"][:2] == ["free", "free"]
    for shape in ((1, 8, 4), (3, 8, 4), (2, 5, 4), (1, 8, 4)):
        x = torch.rand(shape)
        assert torch.equal(extractor(x)["output"], copy.deepcopy(model)(x))


@pytest.mark.slow
def test_a_table_that_is_moved_in_each_call_fixes_no_length() -> None:
    """`self.pos_encoding = self.pos_encoding.to(device=device, dtype=x.dtype)`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CTRLConfig(vocab_size=50, n_positions=256, n_embd=64, dff=32, n_layer=1, n_head=2)
    model = transformers.CTRLModel(config).eval()
    ids, mask = torch.randint(50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    with torch.no_grad():
        extractor = featx.create_feature_extractor(
            model, ["h.0"], example_inputs={"input_ids": ids, "attention_mask": mask, "use_cache": False}
        )
        assert extractor.free_dims.of == {"input_ids": ["free", "free"], "attention_mask": ["free", "free"]}


class GrowingTable(nn.Module):
    """Asks for the length of its table only where it has one."""

    table: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.length = None, 0

    def rows(self, length: int) -> torch.Tensor:
        if self.table is None or length > self.length:
            self.table = torch.arange(length)[:, None] * torch.ones(8)
            self.length = length
        return self.table[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.rows(x.shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [["first"], ["second"], ["first", "output"]])
def test_an_attribute_that_only_the_second_call_asks_for(nodes: list[str]) -> None:
    model = GrowingTable().eval()
    extractor = featx.create_feature_extractor(model, nodes, example_inputs=torch.rand(2, 6, 8))
    for length in (9, 4, 6):
        x = torch.rand(1, length, 8)
        first = model.first(x)
        expected = {"first": first, "output": model(x), "second": model(x)}
        for name, value in extractor(x).items():
            assert torch.equal(value, expected[name])


class Anchors(nn.Module):
    """Keeps anchors by the size of its maps, as detectors do, and counts what it has put together of them."""

    def __init__(self, count: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3, 2, 1)
        self.kept: dict[Any, torch.Tensor] = {}
        self.count = count

    def of_size(self, *size: int) -> torch.Tensor:
        if size not in self.kept:
            self.kept[size] = torch.arange(size[0] * size[1])[:, None] * 1.0
        return self.kept[size]

    def forward(self, x: torch.Tensor) -> Any:
        maps = self.layer(x)
        first, second = self.of_size(*maps.shape[-2:]), self.of_size(maps.shape[-2] // 2, 3)
        together = torch.cat([first, second])
        return maps, together, self.count(together, second)


COUNTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "shape": lambda together, second: together.shape[0],
    "size": lambda together, second: together.new_zeros(together.size(0), 2),
    "len": lambda together, second: [len(together), len(second)],
    "split": lambda together, second: together.split([len(together) - len(second), len(second)]),
    "of a view": lambda together, second: together[1:].reshape(-1).shape,
}


@pytest.mark.parametrize("count", COUNTS)
def test_lengths_of_what_is_made_of_caches_are_followed(count: str) -> None:
    model = Anchors(COUNTS[count]).eval()
    traced = featx.trace(model, torch.rand(1, 3, 32, 32))
    for size in ((32, 32), (32, 48), (37, 33)):
        x = torch.rand(2, 3, *size)
        assert same(traced(x), model(x))


class KeepsConstants(nn.Module):
    """Keeps a tensor that depends on nothing, and counts it and what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> Any:
        if "steps" not in self.kept:
            self.kept["steps"] = torch.arange(10) * 1.0
        steps = self.kept["steps"]
        return x + 1, steps.shape[0], steps.size(0), len(steps), torch.cat([steps, steps]).shape[0]


def test_lengths_of_constants_that_are_kept_are_constants() -> None:
    model = KeepsConstants()
    traced = featx.trace(model, torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(3, 7)):
        assert same(traced(x), model(x))
