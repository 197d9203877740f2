"""The path of a module means what the module returned, whatever else is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import featx


class Block(nn.Module):
    def __init__(self, forward: Callable[[Block, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._function = forward

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


class Model(nn.Module):
    """Runs a block and, with its output, whatever follows."""

    def __init__(self, block: nn.Module, follow: Callable[[Model, Tensor, Any], Any]) -> None:
        super().__init__()
        self.block = block
        self._follow = follow

    def forward(self, x: Tensor) -> Any:
        return self._follow(self, x, self.block(x))


def last_hook(model: nn.Module, path: str, x: Tensor) -> Any:
    seen: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(pytree.tree_map_only(Tensor, torch.clone, output))

    handle = model.get_submodule(path).register_forward_hook(hook)
    model(x)
    handle.remove()
    return seen[-1]


def assert_same(found: Any, expected: Any) -> None:
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def set_first_row(block: Block, x: Tensor) -> Tensor:
    y = block.second(block.first(x))
    y[0] = 1
    return y


BLOCKS: dict[str, Callable[[Block, Tensor], Any]] = {
    "last call": lambda block, x: block.second(block.first(x)),
    "earlier call": lambda block, x: (block.first(x), block.second(x))[0],
    "sum": lambda block, x: block.second(x) + block.first(x),
    "its input": lambda block, x: (block.first(block.second(x)), x)[1],
    "tuple": lambda block, x: (block.first(x), block.second(x)),
    "nested": lambda block, x: {"a": [block.first(x), None], "b": (block.second(x), 3)},
    "part of a tuple": lambda block, x: (block.first(x).chunk(2, 1)[1], block.second(x))[0],
    "parameter": lambda block, x: (block.first(block.second(x)), block.first.weight)[1],
    "entry that is set": set_first_row,
    "none": lambda block, x: (block.first(block.second(x)), None)[1],
    "size": lambda block, x: block.first(block.second(x)).shape[0],
}
FOLLOWS: dict[str, Callable[[Model, Tensor, Any], Any]] = {
    "nothing": lambda model, x, y: x,
    "child called again": lambda model, x, y: model.block.second(x) * 2,
    "child called twice": lambda model, x, y: model.block.first(model.block.second(x)),
    "block called again": lambda model, x, y: model.block(x * 2),
    "write": lambda model, x, y: [each.mul_(2) for each in pytree.tree_leaves(y) if isinstance(each, Tensor)],
}


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize("inner", [(), ("block.first",), ("block.first", "block.second")])
@pytest.mark.parametrize("follow", FOLLOWS)
@pytest.mark.parametrize("block", BLOCKS)
def test_value_of_a_module_is_what_a_hook_sees(block: str, follow: str, inner: Iterable[str], tracer: Any) -> None:
    if (block, follow) in (("its input", "write"), ("parameter", "write")):
        return  # writes the input, or a parameter that wants gradients
    torch.manual_seed(0)
    model = Model(Block(BLOCKS[block]), FOLLOWS[follow]).eval()
    options: dict[str, Any] = {"example_inputs": torch.rand(3, 4)} if tracer == "example" else {"tracer": tracer}
    try:
        extractor = featx.create_feature_extractor(model, ["block", *inner], **options)
    except featx.TraceError:
        assert tracer == "symbolic"
        return
    with torch.no_grad():
        x = torch.rand(5, 4)
        assert_same(extractor(x.clone())["block"], last_hook(model, "block", x.clone()))


class Shared(nn.Module):
    activation = nn.SiLU()

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(inputs, outputs, 3), self.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize("inner", [(), ("0.conv",), ("2.conv",), ("0.conv", "2.conv", "2")])
def test_modules_that_share_one_activation_have_their_own_values(inner: Iterable[str], tracer: Any) -> None:
    model = nn.Sequential(Shared(3, 4), Shared(4, 8), Shared(8, 5)).eval()
    x = torch.rand(1, 3, 16, 16)
    options: dict[str, Any] = {"example_inputs": x} if tracer == "example" else {"tracer": tracer}
    values = featx.create_feature_extractor(model, ["0", *inner], **options)(x)
    for path, value in values.items():
        assert torch.equal(value, last_hook(model, path, x))


def test_marks_change_no_names() -> None:
    model = Model(Block(BLOCKS["part of a tuple"]), lambda model, x, y: y.chunk(2, 1)[0] + y[0]).eval()
    x = torch.rand(3, 4)
    names = featx.get_graph_node_names(model, example_inputs=x)[1]
    tensors = [name for name in names if "getitem" not in name and "chunk" not in name]
    extractor = featx.create_feature_extractor(model, ["block", *tensors], example_inputs=x)
    assert torch.equal(extractor(x)["add"], model(x))


class Parts(nn.Module):
    """Calls the modules of lists, and never a list itself."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> Block:
            return Block(lambda self, x: (y := self.first(x) + x, self.second(y))[0])

        self.blocks = nn.ModuleList([block(), block()])
        self.nested = nn.ModuleDict({"a": nn.ModuleList([block(), block()])})
        self.iterated = nn.Sequential(nn.Linear(4, 4), Block(lambda self, x: ((y := self.first(x)), self.second(y))))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.nested["a"], *self.iterated):
            x = block(x)
        return x[0]


@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize(
    "others", [[], ["blocks.1.first"], ["blocks.1.second", "nested.a.1.second"], ["iterated.1.second", "blocks.0.add"]]
)
def test_list_of_modules_means_what_the_last_of_them_returned(others: list[str], tracer: Any) -> None:
    torch.manual_seed(0)
    model, x = Parts().eval(), torch.rand(2, 4)
    last = {"blocks": "blocks.1", "nested": "nested.a.1", "nested.a": "nested.a.1", "iterated": "iterated.1"}
    found = featx.create_feature_extractor(model, [*last, *others], tracer=tracer)(x)
    for path, of in last.items():
        for value, expected in zip(
            pytree.tree_leaves(found[path]), pytree.tree_leaves(last_hook(model, of, x)), strict=True
        ):
            assert torch.equal(value, expected), path


class Around(nn.Module):
    """Runs a block in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(lambda self, x: self.second(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).tanh()


class Untraceable(nn.Module):
    """Goes on, once or several times, with code that no trace follows."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.blocks = nn.ModuleList([Around(), Around()])
        self.once, self.again = Around(), Around()

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(x)
        for block in self.blocks[: self.times]:
            x = self.again(block(x)) * float(x.detach().numpy().sum())
        return x


@pytest.mark.slow
@pytest.mark.parametrize("path", ["again", "again.block", "blocks"])
def test_module_that_is_called_again_where_no_trace_goes_is_refused(path: str) -> None:
    x = torch.rand(2, 4)
    with pytest.raises(featx.TraceError, match=f"forward calls '{path}' again, whose last call is requested"):
        featx.create_feature_extractor(Untraceable(2), [path], example_inputs=x)
    model = Untraceable(1)
    value = featx.create_feature_extractor(model, [path], example_inputs=x)(x)[path]
    assert torch.equal(value, last_hook(model, "blocks.0" if path == "blocks" else path, x))


class Detects(nn.Module):
    """Says what it computes after the point at which a trace without values ends."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
        self.further: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        for scale in self.further:
            y = self.block(x * scale)
        print("after", float(y.detach().abs().sum()) > 0)  # noqa: T201
        return y


@pytest.mark.parametrize("is_guessed", [True, False])
def test_run_behind_the_last_node_computes_no_convolutions_of_guessed_inputs(
    is_guessed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What forward does there depends on values that are arbitrary, and a detector would take many seconds."""
    model, x = Detects().eval(), torch.rand(1, 3, 8, 8)
    extractor = featx.create_feature_extractor(model, ["block"], example_inputs=None if is_guessed else x)
    assert f"after {not is_guessed}" in capsys.readouterr().out
    assert torch.equal(extractor(x)["block"], model(x))


class NormalizesAndCallsAgain(nn.Module):
    """Does not run where its convolution gives zeros; where it runs, it calls that again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if float(y.detach().abs().sum()) == 0:
            raise ValueError("nothing to normalize")
        return self.block(y / y.norm())


@pytest.mark.slow
def test_model_that_fails_without_convolutions_runs_with_them() -> None:
    model, x = NormalizesAndCallsAgain().eval(), torch.rand(1, 3, 8, 8)
    extractor = featx.create_feature_extractor(model, ["block"])
    assert torch.equal(extractor(x)["block"], last_hook(model, "block", x))


class Grid(nn.Module):
    """Is told by its parent what its tokens are a grid of, as the blocks of Swin for detection are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.height: Any = None
        self.width: Any = None

    def forward(self, x: Tensor) -> Tensor:
        rows, _, channels = x.shape
        return self.linear(x).view(rows, self.height, self.width, channels).roll(1, 2).flatten(1, 2)


class Grids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Grid(), Grid()])

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        x = x.flatten(1, 2)
        for block in self.blocks:
            block.height, block.width = height, width
            x = block(x)
        return x


@pytest.mark.parametrize("wanted", [["blocks.0"], ["blocks.0", "blocks.1.linear"], ["blocks.1"]])
def test_module_whose_attributes_its_parent_sets_is_opened(wanted: list[str]) -> None:
    model = Grids().eval()
    extractor = featx.create_feature_extractor(model, wanted, example_inputs=torch.rand(2, 3, 5, 4))
    for shape in ((2, 3, 5, 4), (1, 6, 2, 4)):
        x = torch.rand(shape)
        for path, value in extractor(x).items():
            assert torch.equal(value, last_hook(model, path, x))
    assert model.blocks[0].height == 6


class Listing(nn.Module):
    """Keeps a value of each call, which no graph does, and runs a module that is registered outside it."""

    def __init__(self, inner: nn.Module, values: list[Any]) -> None:
        super().__init__()
        self.inner, self.values = inner, values

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.values.append(x * 2)
        return x if self.values else -x


def test_error_for_a_name_says_which_modules_are_one_node_and_why() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.ModuleDict({"inner": inner, "listing": Listing(inner, [])})
    model.forward = lambda x: model["listing"](x)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(featx.NodeNameError, match=r"'listing' is one node .*: forward adds to 'values'"):
        featx.create_feature_extractor(model, ["inner.0"], example_inputs=torch.rand(2, 4))


class Unfollowed(nn.Module):
    """Cannot be traced through; the root runs a part of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.first(x).detach().numpy()) * 2


class UsingParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Unfollowed(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(self.inner.first(x))))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [["inner"], ["inner", "inner.first"], ["inner.first", "last"], ["inner", "last"]])
def test_part_of_a_module_that_cannot_be_followed_goes_with_the_module(wanted: list[str]) -> None:
    model, x = UsingParts().eval(), torch.rand(3, 4)
    values = featx.create_feature_extractor(model, wanted, example_inputs=torch.rand(2, 4))(x)
    first = model.inner.first(x)
    # `inner` is one node, and has two calls: `inner_1` is the second one.
    expected = {"inner.first": first, "inner": model.inner(first), "last": last_hook(model, "last", x)}
    for path, value in values.items():
        assert torch.equal(value, expected[path])


class Reversible(nn.Module):
    """Is called to normalize and, with what it has kept, to put back, as RevIN of time series models is."""

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "normalize":
            self.mean = x.mean(1, keepdim=True)
            return x - self.mean
        return x + self.mean


class Forecasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.scale, self.encoder = Reversible(), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.encoder(self.scale(x, "normalize")), "put back")


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["encoder.layers.0", "encoder.layers.0.linear1"])
def test_layers_inside_of_one_of_torch_beside_a_module_that_is_called_twice(inner: str) -> None:
    model, x = Forecasts().eval(), torch.rand(2, 5, 8)
    extractor = featx.create_feature_extractor(model, ["scale", inner], example_inputs=x)
    for given in (x, torch.rand(3, 5, 8)):
        found = extractor(given)
        for path in ("scale", inner):
            assert torch.equal(found[path], last_hook(model, path, given))
