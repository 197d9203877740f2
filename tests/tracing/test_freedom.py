"""trace_checked: which dimensions of the inputs a graph leaves open, and the checks of the others."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx
from featx import ExampleTracer, GraphModule, SpecializationError
from featx.tracing.calls import given
from featx.tracing.checks.checked_trace import trace_checked
from featx.tracing.recording.numbers import Numbers
from featx.tracing.sizes.outcomes import FREE, FreeDims, Outcome


def free_dims(model: Any, *args: Any, **kwargs: Any) -> FreeDims:
    return trace_checked(ExampleTracer(), model, args, kwargs)[1]


def kinds(dims: list[str]) -> list[str]:
    return [dim.partition(":")[0] for dim in dims]


def test_model_that_sees_no_size_leaves_all_to_its_layers() -> None:
    assert free_dims(nn.ReLU(), torch.ones(2, 3, 4)).of == {"input": ["free, unless a layer refuses it"] * 3}


def loop(x: torch.Tensor) -> torch.Tensor:
    for index in range(x.shape[1]):
        x = x + index
    return x


def test_length_of_a_loop_is_fixed_and_checked() -> None:
    trace, free = trace_checked(ExampleTracer(), loop, (torch.ones(2, 3),), {})
    assert kinds(free.of["x"]) == ["free", "fixed"]
    module = GraphModule(trace.model_context.root, trace.graph)
    assert torch.equal(module(torch.ones(5, 3)), loop(torch.ones(5, 3)))
    with pytest.raises(SpecializationError, match="dimension 1 of input 'x'"):
        module(torch.ones(2, 4))


def in_pairs(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split(2)
    left, right = x.chunk(2, dim=1)
    return first @ second.T + left.sum() - right.sum()


def test_how_many_parts_are_unpacked_fixes_the_size_that_they_follow_from() -> None:
    trace, free = trace_checked(ExampleTracer(), in_pairs, (torch.ones(4, 6),), {})
    assert kinds(free.of["x"]) == ["fixed", "free"]
    module = GraphModule(trace.model_context.root, trace.graph)
    assert torch.equal(module(torch.ones(4, 8)), in_pairs(torch.ones(4, 8)))
    with pytest.raises(ValueError, match="too many values"):
        in_pairs(torch.ones(6, 6))
    with pytest.raises(SpecializationError, match="input 'x' is fixed"):
        module(torch.ones(6, 6))


def wants_width_three(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] != 3:
        raise ValueError("three, please")
    return x * 2


def _two_chunks(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2)
    return first.sum() + second.sum()


def _four_chunks(x: torch.Tensor) -> torch.Tensor:
    first, second, third, fourth = torch.chunk(x, 4)
    return first.sum() + second.sum() - third.sum() + fourth.sum()


def _halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split(x.shape[0] // 2)
    return first.sum() - second.sum()


def _chunks_of_chosen_rows(x: torch.Tensor) -> torch.Tensor:
    first, second = x[x[:, 0] > 0].chunk(2)
    return first.sum() - second.sum()


@pytest.mark.parametrize(
    ("function", "taken", "refused"),
    [
        (_two_chunks, (2, 3, 9), (1,)),
        (_four_chunks, (4, 7, 16), (1, 3, 9)),  # 9 rows are three chunks
        (_halves, (2, 16), (3, 9)),  # of which there are three then
        (_chunks_of_chosen_rows, (2, 9), (1,)),
    ],
)
def test_how_many_parts_are_unpacked_is_checked_where_it_follows_from_a_free_length(
    function: Callable[[torch.Tensor], torch.Tensor], taken: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    for training in (False, True):
        model = Model().train(training)
        extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(8, 3), adaptive=False)
        for count in taken:
            x = torch.rand(count, 3)
            assert torch.equal(extractor(x)["output"], model(x))
        for count in refused:
            x = torch.rand(count, 3)
            with pytest.raises(ValueError, match="to unpack"):
                model(x)
            with pytest.raises(featx.SpecializationError, match="how many tensors"):
                extractor(x)


def test_how_many_parts_are_unpacked_is_not_checked_where_no_free_length_decides_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.layer(x).chunk(2, dim=1)
            third, fourth = (first + second).unsqueeze(0).repeat(2, 1, 1).unbind(0)
            return third - 2 * fourth

    extractor = featx.create_feature_extractor(Model().eval(), ["output"], example_inputs=torch.rand(3, 2))
    assert "len(" not in extractor.code


def test_length_that_the_model_refuses_to_change_is_fixed_and_says_so() -> None:
    (first, second) = free_dims(wants_width_three, torch.ones(2, 3)).of["x"]
    assert first == "free"
    assert second.startswith("fixed")
    assert "ValueError" in second


def sizes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0] * x.shape[1]) / x.shape[1]


def test_arithmetic_on_sizes_leaves_them_free() -> None:
    assert kinds(free_dims(sizes, torch.ones(2, 3)).of["x"]) == ["free", "free"]


def two(first: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    return loop(first) + more["y"][0]


def test_nested_inputs_have_names_of_their_own() -> None:
    free = free_dims(two, torch.ones(2, 3), {"y": [torch.ones(2, 3)]})
    assert list(free.of) == ["first", "more['y'][0]"]
    assert kinds(free.of["first"]) == ["free", "fixed"]


def even(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] % 2 == 0 else x + 1


@pytest.mark.parametrize("width", [3, 4, 6])
def test_remainder_is_not_taken_for_free_because_twice_the_length_has_it_too(width: int) -> None:
    trace, _ = trace_checked(ExampleTracer(), even, (torch.ones(2, width),), {})
    module = GraphModule(trace.model_context.root, trace.graph)
    for other in range(1, 9):
        x = torch.ones(2, other)
        try:
            result = module(x)
        except SpecializationError:
            continue
        assert torch.equal(result, even(x))
    assert torch.equal(module(torch.ones(5, width)), even(torch.ones(5, width)))


def test_report_has_one_line_for_each_input() -> None:
    assert repr(FreeDims({"x": [FREE, Outcome("fixed: why")], "y": [FREE]})) == "x: free, fixed: why\ny: free"


def test_inputs_and_model_are_as_before() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    free_dims(loop, x)
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3))


class ImageAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.text = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(16, 8)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        rows, _, height, width = image.shape
        return self.conv(image).reshape(rows, -1, height, width) + self.text(text).mean(1)[..., None, None]


def test_inputs_that_have_one_length_by_chance_are_varied_apart() -> None:
    free = free_dims(ImageAndText(), torch.rand(2, 4, 16, 16), torch.rand(2, 5, 16)).of
    assert kinds(free["image"]) == ["free", "fixed", "free", "free"]
    assert kinds(free["text"]) == ["free", "free", "fixed"]


class Checkpointing(nn.Module):
    def __init__(self, does_checkpoint: bool) -> None:
        super().__init__()
        self.linear, self.does_checkpoint = nn.Linear(4, 4), does_checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and self.does_checkpoint:
            return self.linear(x) * 2
        return self.linear(x)


@pytest.mark.parametrize("is_made_with_gradients", [True, False])
def test_question_for_gradients_that_decides_nothing_is_not_checked(is_made_with_gradients: bool) -> None:
    x = torch.rand(3, 4)
    for does_checkpoint in (False, True):
        model = Checkpointing(does_checkpoint)
        with torch.set_grad_enabled(is_made_with_gradients):
            trace, _ = trace_checked(ExampleTracer(), model, (x,), {})
        module = GraphModule(trace.model_context.root, trace.graph)
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                if does_checkpoint and enabled is not is_made_with_gradients:
                    with pytest.raises(SpecializationError, match="gradients"):
                        module(x)
                else:
                    assert torch.equal(module(x), model(x))


def halves_if_divisible(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] % 8 != 0:
        return x * 2
    return x.reshape(x.shape[0], x.shape[1] // 8, 8).sum(-1)


def test_remainder_is_checked_and_fixes_no_length() -> None:
    trace, free = trace_checked(ExampleTracer(), halves_if_divisible, (torch.ones(2, 16),), {})
    assert kinds(free.of["x"]) == ["free", "free"]
    module = GraphModule(trace.model_context.root, trace.graph)
    for width in (16, 24, 8):
        x = torch.rand(3, width)
        assert torch.equal(module(x), halves_if_divisible(x))
    with pytest.raises(SpecializationError, match="%"):
        module(torch.rand(3, 17))


class Biased(nn.Module):
    """Cuts a table of its own to the length of the input, as MPT does with its bias for positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(32.0)
        return x + table[max(0, table.shape[0] - x.shape[1]) :]


def test_constant_is_cut_by_the_length_of_the_input() -> None:
    trace, free = trace_checked(ExampleTracer(), Biased(), (torch.ones(2, 12),), {})
    assert kinds(free.of["x"]) == ["free", "free"]
    module = GraphModule(trace.model_context.root, trace.graph)
    assert torch.equal(module(torch.ones(3, 9)), Biased()(torch.ones(3, 9)))


def convolve(x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
    """One layer of a graph network: as many nodes as the adjacency matrix has rows, and columns."""
    return torch.sparse.mm(adjacency, x).view(x.shape[0], -1)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_dimensions_that_change_together_wherever_they_are(is_sparse: bool) -> None:
    def graph(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        adjacency = torch.rand(nodes, nodes).round()
        return torch.rand(nodes, 4), adjacency.to_sparse() if is_sparse else adjacency

    trace, free = trace_checked(ExampleTracer(), convolve, graph(5), {})
    together = "free, with all others of this length"
    assert free.of["adjacency"] == [together, together]
    assert free.of["x"][0] == together
    module = GraphModule(trace.model_context.root, trace.graph)
    for nodes in (5, 9):
        inputs = graph(nodes)
        assert torch.equal(module(*inputs), convolve(*inputs))


def test_mask_over_all_pairs_of_a_sequence_leaves_its_length_free() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            batch, length = ids.shape
            pairs = mask.view(batch, 1, length, length).expand(-1, 2, -1, -1).reshape(-1, length, length)
            x = self.embedding(ids)
            return self.attention(x, x, x, attn_mask=pairs, need_weights=False)[0]

    model = Attending().eval()
    trace, _ = trace_checked(ExampleTracer(), model, (torch.ones(2, 6).long(), torch.zeros(2, 6, 6)), {})
    module = GraphModule(model, trace.graph).eval()
    ids, mask = torch.randint(50, (3, 9)), torch.randn(3, 9, 9)
    assert torch.equal(module(ids, mask), model(ids, mask))


def test_rank_is_checked_where_forward_sees_a_shape() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return x + sum(x.shape)

    trace, _ = trace_checked(ExampleTracer(), total, (torch.ones(2, 3),), {})
    module = GraphModule(trace.model_context.root, trace.graph)
    assert torch.equal(module(torch.ones(4, 5)), total(torch.ones(4, 5)))
    with pytest.raises(SpecializationError, match="input 'x' has 3 dimensions now, 2 on the example"):
        module(torch.ones(2, 3, 4))


@pytest.mark.parametrize("error", [AttributeError, AssertionError, NameError])
def test_fault_of_featx_at_another_size_is_not_taken_for_a_refusal_of_the_model(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_sizes = Numbers.new_sizes

    def fails_at_other_sizes(self: Numbers, *args: Any) -> Any:
        if self.earlier is not None:
            raise error("a fault of featx")
        return new_sizes(self, *args)

    monkeypatch.setattr(Numbers, "new_sizes", fails_at_other_sizes)
    monkeypatch.setattr(fails_at_other_sizes, "__code__", _as_code_of_featx(fails_at_other_sizes))
    with pytest.raises(error, match="a fault of featx"):
        free_dims(loop, torch.ones(2, 3))


class TakesDict(nn.Module):
    def forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return values["a"] * 2


class GivesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taker = TakesDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.taker({"a": x})


def test_name_that_featx_lacks_is_no_reason_to_trace_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(given, "parts_of")
    with pytest.raises(NameError, match="parts_of"):
        featx.create_feature_extractor(GivesDict().eval(), ["taker"], example_inputs=torch.rand(2, 3))


def _as_code_of_featx(function: Any) -> CodeType:
    return function.__code__.replace(co_filename=Numbers.__init__.__code__.co_filename)


def test_error_of_the_model_at_another_size_is_a_refusal_whatever_its_class() -> None:
    def wants_three(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 3
        return x + 1

    assert kinds(free_dims(wants_three, torch.ones(2, 3)).of["x"]) == ["free", "fixed"]


def shift_by_the_shorter_side(x: torch.Tensor) -> torch.Tensor:
    shift = 2 if min(x.shape[1], x.shape[2]) > 4 else 0
    return torch.roll(x, (shift, min(*x.shape[1:])), (1, 2)) * max(x.shape[1:])


def test_which_side_of_a_square_is_the_shorter_one_fixes_none() -> None:
    trace, free = trace_checked(ExampleTracer(), shift_by_the_shorter_side, (torch.ones(2, 8, 8),), {})
    assert kinds(free.of["x"]) == ["free", "free", "free"]
    module = GraphModule(trace.model_context.root, trace.graph)
    for shape in ((2, 8, 8), (3, 12, 8), (1, 8, 20), (1, 5, 6)):
        x = torch.rand(shape)
        assert torch.equal(module(x), shift_by_the_shorter_side(x))
    with pytest.raises(SpecializationError):
        module(torch.rand(1, 4, 9))


class PicksALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[min(x.shape[0], x.shape[1])](x)


def test_the_shorter_of_two_equal_sides_that_picks_a_layer_is_checked() -> None:
    model = PicksALayer()
    trace, _ = trace_checked(ExampleTracer(), model, (torch.ones(4, 4),), {})
    module = GraphModule(trace.model_context.root, trace.graph)
    for length in (4, 3, 2, 6):
        x = torch.rand(length, 4)
        try:
            found = module(x)
        except SpecializationError:
            assert length != 4
        else:
            assert torch.equal(found, model(x))


class Limited(nn.Module):
    """As GPT-2 and its heirs: a table of positions that is no longer than the block."""

    def __init__(self, is_right: Callable[[Any, torch.Tensor], bool]) -> None:
        super().__init__()
        self.positions, self.linear, self.is_right = nn.Embedding(8, 4), nn.Linear(4, 4), is_right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_right(self, x):  # as `assert` does, which pytest rewrites here
            raise AssertionError("the text is too long")
        return self.linear(x + self.positions(torch.arange(x.shape[1])))


LIMITS: dict[str, Callable[[Any, torch.Tensor], bool]] = {
    "a number": lambda model, x: x.shape[1] <= 8,
    "the size of the table": lambda model, x: x.size(1) <= model.positions.weight.shape[0],
    "the other way round": lambda model, x: not x.shape[1] > model.positions.num_embeddings,
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("length", [8, 5])
def test_example_may_be_as_long_as_the_model_takes(limit: Callable[[Any, torch.Tensor], bool], length: int) -> None:
    model = Limited(limit)
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=torch.rand(2, length, 4))
    assert extractor.free_dims.of["x"][:2] == ["free", "free, if the model takes that length"]
    for shape in ((2, 8, 4), (3, 5, 4), (1, 1, 4)):
        x = torch.rand(shape)
        assert torch.equal(extractor(x)["linear"], model(x))
    with pytest.raises((AssertionError, featx.SpecializationError)):
        extractor(torch.rand(2, 9, 4))


def counts_if_small(x: torch.Tensor) -> torch.Tensor:
    return x * float(sum([1] * x.shape[1])) if x.shape[1] <= 8 else x


# Decisions that are others for longer inputs; and whether shorter ones are free.
LARGER: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "above a number": (lambda x: x * 2 if x.shape[1] > 10 else x, True),
    "a product above a number": (lambda x: x * 2 if x.shape[1] * x.shape[2] > 40 else x, True),
    "not above a number": (lambda x: x if x.shape[1] <= 10 else x * 2, True),
    "equal to a number": (lambda x: x * 2 if x.shape[1] == 8 else x, False),
    "a count of C code": (lambda x: x * 2 if len([0] * x.shape[1]) > 10 else x, False),
    "a count of C code below a number": (counts_if_small, False),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_decision_about_longer_inputs_leaves_shorter_ones_free(name: str) -> None:
    function, is_free = LARGER[name]

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.linear(x))

    model = Decides()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 8, 4), adaptive=False)
    for length in (8, 5, 3, 10, 11, 30):
        x = torch.rand(2, length, 4)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            assert length > 10 or not is_free
        else:
            assert torch.equal(found, model(x))


BRANCHES: dict[str, Callable[[Any], bool]] = {
    "product": lambda shape: bool(np.prod(shape) == 6 * 1237),
    "array": lambda shape: np.array(shape)[0] > 5000,
    "remainder": lambda shape: np.int64(shape[0]) % 1237 == 0,
    "inside numpy": lambda shape: bool(np.any(np.array(shape) == 1237)),
}


@pytest.mark.parametrize("branch", BRANCHES.values(), ids=BRANCHES)
def test_array_of_a_shape_that_decides_is_checked(branch: Callable[[Any], bool]) -> None:
    """What numpy makes of a size decides at a length that no further run of the trace has."""

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if branch(x.shape) else x * 3

    model = Branching()
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=torch.rand(2, 6), adaptive=False)
    assert torch.equal(extractor(torch.ones(2, 6))["mul"], torch.full((2, 6), 3.0))
    decisions = [bool(branch((length, 6))) for length in (1237, 40_000)]
    assert any(decisions)
    for length, is_other in zip((1237, 40_000), decisions, strict=True):
        if is_other:
            with pytest.raises(featx.SpecializationError):
                extractor(torch.ones(length, 6))
            continue
        try:
            found = extractor(torch.ones(length, 6))["mul"]
        except featx.SpecializationError:
            continue  # the size is fixed
        assert torch.equal(found, model(torch.ones(length, 6)))


def test_number_that_numpy_makes_of_a_size_is_computed_anew() -> None:
    class Scaling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(np.log2(x.shape[1]))

    model = Scaling()
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=torch.rand(2, 6), adaptive=False)
    for shape in ((3, 6), (2, 7)):
        assert torch.equal(extractor(torch.ones(shape))["mul"], model(torch.ones(shape)))


class MultiplesAndOne(nn.Module):
    """Takes sides that are multiples of eight and one, as PSPNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        if (height - 1) % 8 or (width - 1) % 8:
            raise AssertionError("sides are multiples of 8, and one")
        return nn.functional.interpolate(self.conv(x), size=(int((height - 1) / 8 + 1), (width - 1) // 8 + 1))


def test_sides_that_are_multiples_and_one_are_free() -> None:
    model, x = MultiplesAndOne().eval(), torch.rand(2, 3, 17, 17)
    extractor = featx.create_feature_extractor(model, ["conv", "output"], example_inputs=x)
    for height, width in ((17, 17), (25, 33), (9, 17), (33, 9)):
        given = torch.rand(2, 3, height, width)
        assert torch.equal(extractor(given)["output"], model(given))


def by_a_table(x: torch.Tensor) -> torch.Tensor:
    return x * ([1.0] * 1000 + [2.0] * 20_000)[x.shape[1]]


def by_half_of_the_length(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if 0.5 * x.shape[1] > 500 else x


@pytest.mark.parametrize("function", [by_a_table, by_half_of_the_length])
def test_a_length_of_some_thousands_at_which_c_code_does_something_else_is_noticed(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    traced = featx.trace(function, torch.rand(1, 16))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(1, 2000))


@pytest.mark.slow
def test_a_grid_that_numpy_makes_of_sizes_takes_no_gigabytes() -> None:
    class HasGrid(nn.Module):
        """Adds coordinates, as slot attention does."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            height, width = x.shape[1:3]
            grid = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
            return x + self.linear(torch.from_numpy(np.stack(grid, -1)[None].astype(np.float32)))

    model, x = HasGrid().eval(), torch.rand(2, 6, 6, 4)
    tracemalloc.start()
    try:
        extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300e6
    assert torch.equal(extractor(x[:1])["output"], model(x[:1]))
    with pytest.raises(featx.SpecializationError):
        extractor(torch.rand(2, 8, 6, 4))


@pytest.mark.parametrize("function", [by_a_table, by_half_of_the_length])
def test_such_a_length_is_noticed_beside_numpy(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def beside_numpy(x: torch.Tensor) -> torch.Tensor:
        return function(x) * float(np.sqrt(4.0))

    traced = featx.trace(beside_numpy, torch.rand(1, 16))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(1, 2000))


@pytest.mark.parametrize(("length", "other"), [(5, "free, if the model takes that length"), (4, "free"), (2, "free")])
def test_lengths_that_the_model_does_not_take_together_are_free_beside_numpy(length: int, other: str) -> None:
    class Scaled(Limited):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(np.sqrt(4.0))

    model = Scaled(LIMITS["a number"])
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, length, 4))
    assert extractor.free_dims.of["x"][:2] == ["free", other]
    for shape in ((5, length, 4), (3, 8, 4), (1, 1, 4)):
        x = torch.rand(shape)
        assert torch.equal(extractor(x)["output"], model(x))


def test_lengths_that_decide_together_are_noticed_beside_numpy_where_the_model_takes_few() -> None:
    def limited(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 40:
            raise ValueError("too long")
        return (x * 2 if 0.5 * (x.shape[0] * x.shape[1]) > 500 else x) * float(np.sqrt(4.0))

    traced = featx.trace(limited, torch.rand(1, 16))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(100, 16))


class HasTable(nn.Module):
    """Is kept whole, as it makes a buffer in forward, and asks for a size in C code before that."""

    table: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table
        if table is None or table.shape[0] < x.shape[0]:
            table = torch.arange(int(str(x.shape[0])))
            self.register_buffer("table", table, persistent=False)
        return x * table[: x.shape[0], None, None]


def test_sizes_that_a_module_reads_which_is_kept_whole_are_free() -> None:
    model = nn.Sequential(HasTable(), nn.Linear(4, 4)).eval()
    traced = featx.trace(model, torch.rand(2, 3, 4))
    assert traced.meta["free_dims"].of["input"][:2] == ["free", "free"]
    x = torch.rand(5, 7, 4)
    assert torch.equal(traced(x), model(x))
