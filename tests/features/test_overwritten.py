"""Values that the model overwrites are cloned where they are asked for and written later, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torchvision
from agreement import image, run, same
from torch import nn
from torch.nn import functional

import featx
from featx.tree import clone_tensors, tree_leaves

X4 = torch.linspace(-1, 1, 12).view(3, 4)


class Noting(nn.Module):
    """Notes clones of its own values where it is told to: what a feature must be."""

    notes: dict[str, Any] | None = None

    def __init__(self, compute: Callable[[Noting, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.sub = WritesItsInput()
        self.register_buffer("state", torch.ones(4))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)

    def note(self, name: str, value: Any) -> Any:
        if self.notes is not None:
            self.notes[name] = clone_tensors(value)
        return value


class WritesItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x[:, :2]


def by_a_module(model: Noting, x: torch.Tensor) -> Any:
    x = model.note("linear", model.linear(x))
    return model.note("relu", model.relu(x))


def by_a_module_twice(model: Noting, x: torch.Tensor) -> Any:
    first = model.note("norm", model.norm(x))
    model.relu(first)
    second = model.note("norm_1", model.norm(first))
    second.sub_(1)
    return model.note("add", first + second)


def by_methods(model: Noting, x: torch.Tensor) -> Any:
    x = model.note("mul", x * 2)
    x.masked_fill_(x > 0, 1.0)
    model.note("masked_fill_", x)
    x.index_add_(0, torch.tensor([0]), torch.ones(1, 4))
    return model.note("index_add_", x)


def by_operators(model: Noting, x: torch.Tensor) -> Any:
    x = model.note("mul", x * 2)
    x += 1
    model.note("add", x)
    x[:, 0] = 5
    return model.note("sub", x - 1)


def by_an_out_argument(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("detach", model.note("linear", model.linear(x)).detach())
    torch.add(y, 1, out=y)
    return model.note("mul", y * 2)


def in_a_loop(model: Noting, x: torch.Tensor) -> Any:
    x = model.note("linear", model.linear(x))
    for name, step in (("add_", 1), ("add__1", 2), ("add__2", 3)):
        model.note(name, x.add_(step))
    return x


def through_views(model: Noting, x: torch.Tensor) -> Any:
    x = model.note("linear", model.linear(x))
    row = model.note("getitem", x[0])
    flat = model.note("view", x.view(-1))
    model.note("add_", x.add_(1))
    first = model.note("getitem_1", flat[1])
    model.note("mul_", row.mul_(2))
    return model.note("add", x + first)


def through_views_of_views(model: Noting, x: torch.Tensor) -> Any:
    x = model.note("view", x.view(-1, 2, 2))
    y = model.note("transpose", x.transpose(1, 2))
    z = model.note("reshape", y.reshape(-1, 4))  # a copy
    z.mul_(2)
    x.mul_(3)
    return model.note("add", z + 1)


def before_it_is_seen(model: Noting, x: torch.Tensor) -> Any:
    x = x * 2
    flat = x.view(-1)
    x.add_(1)
    return model.note("getitem", flat[:3])


def of_a_tuple(model: Noting, x: torch.Tensor) -> Any:
    parts = model.note("split", (x * 2).split(2, 1))
    parts[0].add_(1)
    return model.note("cat", torch.cat(parts, 1))


def of_the_input(model: Noting, x: torch.Tensor) -> Any:
    model.note("x", x)
    x.mul_(2)
    return model.note("add", x + 1)


def of_what_is_passed_on(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("to", x.to(torch.float32))
    z = model.note("contiguous", x.contiguous())
    x.zero_()
    return model.note("add", y + z)


def of_an_identity(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("drop", model.drop(x * 2))
    y.add_(1)
    return model.note("add", y + 1)


def by_a_whole_module(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("linear", model.linear(x))
    z = model.note("sub", model.sub(y))
    y.add_(1)
    return model.note("add", y[:, :2] + z)


def by_data(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("detach", model.linear(x).detach())
    y.data.mul_(3)
    return model.note("add", y + 1)


def of_a_buffer(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("add", x + model.state)
    model.state.add_(1)
    return model.note("add_1", y + model.state)


def of_a_random_draw(model: Noting, x: torch.Tensor) -> Any:
    y = model.note("randn", torch.randn(x.shape))
    y.mul_(x)
    return model.note("dropout", functional.dropout(y))


# What is asked for, and which of it must be cloned.
CASES: list[tuple[Callable[[Noting, torch.Tensor], Any], str, str]] = [
    (by_a_module, "linear relu", "linear"),
    (by_a_module, "linear", ""),
    (by_a_module, "relu", ""),
    (by_a_module_twice, "norm norm_1 add", "norm norm_1"),
    (by_a_module_twice, "norm norm_1", "norm"),
    (by_a_module_twice, "norm", ""),
    (by_a_module_twice, "norm_1 add", "norm_1"),
    (by_methods, "mul masked_fill_ index_add_", "mul masked_fill_"),
    (by_methods, "mul masked_fill_", "mul"),
    (by_operators, "mul add sub", "mul add"),
    (by_operators, "add", ""),
    (by_an_out_argument, "linear detach mul", "linear detach"),
    (by_an_out_argument, "linear detach", ""),
    (in_a_loop, "linear add_ add__1 add__2", "linear add_ add__1"),
    (in_a_loop, "add__2", ""),
    (through_views, "linear getitem view add_ getitem_1 mul_ add", "linear getitem view add_ getitem_1"),
    (through_views, "linear getitem view", ""),
    (through_views, "view add_", "view"),
    (through_views, "getitem_1 mul_", "getitem_1"),
    (through_views_of_views, "view transpose reshape add", "view transpose reshape"),
    (through_views_of_views, "transpose reshape", ""),
    (before_it_is_seen, "getitem", ""),
    (of_a_tuple, "split cat", "split"),
    (of_a_tuple, "split", ""),
    (of_the_input, "x add", "x"),
    (of_the_input, "x", ""),
    (of_what_is_passed_on, "to contiguous add", "to contiguous"),
    (of_what_is_passed_on, "to contiguous", ""),
    (of_an_identity, "drop add", "drop"),
    (by_a_whole_module, "linear sub add", "linear sub"),
    (by_a_whole_module, "linear sub", "linear"),
    (by_a_whole_module, "sub", ""),
    (by_data, "detach add", "detach"),
    (of_a_buffer, "add add_1", ""),
    (of_a_random_draw, "randn dropout", "randn"),
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("compute", "names", "cloned"), CASES)
def test_value_is_the_one_that_was_computed_and_only_what_is_written_later_is_cloned(
    compute: Callable[[Noting, torch.Tensor], Any], names: str, cloned: str, training: bool
) -> None:
    model = Noting(compute).train(training)
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, names.split(), example_inputs=image())
    for seed, batch in enumerate((2, 5)):
        twin.notes = {}
        run(twin, image(batch, seed=seed))
        result = run(extractor, image(batch, seed=seed))
        assert same(dict(sorted(result.items())), {name: twin.notes[name] for name in sorted(names.split())})
    clones = [node.args[0].name for node in extractor.graph.nodes if node.target is clone_tensors]
    if compute is by_a_module_twice and training:
        cloned = cloned or "norm"  # its second call writes statistics, so it runs, and the relu before it
    assert sorted(clones) == sorted(cloned.split())


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "names", "cloned"), [case for case in CASES if case[2]])
def test_value_that_is_overwritten_would_be_wrong_without_its_clone(
    compute: Callable[[Noting, torch.Tensor], Any], names: str, cloned: str
) -> None:
    model = Noting(compute).eval()
    extractor = featx.create_feature_extractor(model, names.split(), example_inputs=image())
    expected = run(extractor, image())
    for node in extractor.graph.nodes:
        if node.target is clone_tensors:
            node.replace_all_uses_with(node.args[0])
    result = run(extractor, image())
    assert {name for name in expected if not same(expected[name], result[name])} == set(cloned.split())


def in_a_cast_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x * 2
    kept = doubled.clone()
    doubled.to(torch.float16).add_(1)
    return kept, doubled


def in_a_contiguous_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = (x * 2).transpose(0, 1)
    kept = doubled.clone()
    doubled.contiguous().add_(1)
    return kept, doubled


def in_a_flat_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = (x * 2).transpose(0, 1)
    kept = doubled.clone()
    functional.relu(doubled.flatten() - 1, inplace=True)
    doubled.flatten().add_(1)
    return kept, doubled


class Pair(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x)


@pytest.mark.parametrize(
    ("compute", "name", "other"),
    [
        (in_a_cast_value, "mul", torch.full((2, 3), 0.5, dtype=torch.float16)),
        (in_a_contiguous_value, "transpose", torch.full((2, 1), 0.5)),
        (in_a_flat_value, "transpose", torch.full((2, 1), 0.5)),
    ],
)
def test_what_is_a_copy_on_the_example_and_the_same_memory_for_another_input_is_cloned(
    compute: Callable[[torch.Tensor], Any], name: str, other: torch.Tensor
) -> None:
    example = torch.full((2, 3), 0.5)
    assert same(*compute(example))
    kept, overwritten = compute(other)
    assert not same(kept, overwritten)
    extractor = featx.create_feature_extractor(Pair(compute), [name, "add_"], example_inputs=example)
    assert same(extractor(other)[name], kept)
    assert same(extractor(example)[name], compute(example)[0])


@pytest.mark.parametrize("name", ["layer4.1.bn2", "layer4.1.add", "layer3.0.bn1", "layer4"])
def test_gradient_with_respect_to_a_feature_is_that_of_a_forward_hook(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    images = torch.rand(2, 3, 64, 64)
    kept: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value.clone()  # which the model may overwrite

    if name.endswith("add"):  # what comes out of the last batch norm is added to, in place
        block: Any = model.layer4[1]
        block.forward = lambda x: block.relu(keep(block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x))))) + x))
    else:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: keep(output))
    (expected,) = torch.autograd.grad(model(images)[:, 1].sum(), kept)
    model = copy.deepcopy(model)
    vars(model.layer4[1]).pop("forward", None)
    for module in model.modules():
        module._forward_hooks.clear()
    features = featx.create_feature_extractor(model, [name, "fc"])(images)
    assert torch.equal(features[name], kept[0])
    (gradient,) = torch.autograd.grad(features["fc"][:, 1].sum(), features[name])
    assert torch.equal(gradient, expected)


class PassesOn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] > 100 else x * 2


def test_gradient_with_respect_to_a_sequential_whose_parts_may_return_their_inputs() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(PassesOn(), nn.Linear(4, 4))  # the result is always that of the linear layer
    model = nn.Sequential(body, nn.ReLU(inplace=True))
    found = featx.create_feature_extractor(model, ["0", "1"], example_inputs=X4)(X4)
    assert torch.equal(found["0"], body(X4))
    [gradient] = torch.autograd.grad(found["1"].sum(), found["0"])
    assert torch.equal(gradient, (found["0"] > 0).float())


class Returns(nn.Module):
    """Returns what it has computed in some way other than as its last value."""

    def __init__(self, result: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.result = nn.Linear(4, 4), nn.Linear(4, 4), result

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        self.b(x)
        return self.result(x, y)


RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "an earlier value": lambda x, y: y,
    "its input": lambda x, y: x,
    "a tuple": lambda x, y: (y, x),
    "a tuple of twice the same": lambda x, y: (y, y),
    "a tuple with a view": lambda x, y: (y.view(-1)[2:], y),
    "a list": lambda x, y: [y, x + 1],
    "a dict": lambda x, y: {"y": y, "x": x},
    "nested": lambda x, y: ({"y": [y]}, x * 2),
    "written through a view": lambda x, y: (y, y.view(-1).mul_(2))[:1],
}


def first_tensor(value: Any) -> torch.Tensor:
    return next(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class WritesResult(nn.Module):
    def __init__(self, result: Callable[[Any, Any], Any], write: str) -> None:
        super().__init__()
        self.stem, self.p, self.relu, self.write = nn.Linear(4, 4), Returns(result), nn.ReLU(inplace=True), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = first_tensor(self.p(self.stem(x)))
        return self.relu(value) if self.write == "relu" else value.mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize(
    "request_", [["p"], ["p", "LAST"], ["p", "p.a", "LAST"], ["stem", "p", "p.b", "LAST"]], ids=str
)
@pytest.mark.parametrize("write", ["relu", "mul_"])
@pytest.mark.parametrize("result", RESULTS)
def test_what_an_opened_module_returned_is_not_overwritten(
    result: str, write: str, request_: list[str], tracer: Literal["example", "symbolic"]
) -> None:
    torch.manual_seed(0)
    model = WritesResult(RESULTS[result], write).eval()
    names = [name.replace("LAST", write) for name in request_]
    options: Any = {"example_inputs": X4} if tracer == "example" else {"tracer": "symbolic"}
    extractor = featx.create_feature_extractor(model, names, **options)
    seen: dict[str, Any] = {}
    for name in ("stem", "p", "p.a", "p.b"):
        hook = lambda module, args, output, name=name: seen.update({name: clone_tensors(output)})  # noqa: E731
        model.get_submodule(name).register_forward_hook(hook)
    seen[write] = model(X4.clone())
    found = extractor(X4.clone())
    for name in names:
        pairs = zip(tree_leaves(found[name]), tree_leaves(seen[name]), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), name


@pytest.mark.parametrize("result", ["an earlier value", "a tuple", "a dict", "nested"])
def test_gradients_with_respect_to_what_a_module_returned_exist(result: str) -> None:
    torch.manual_seed(0)
    model = WritesResult(RESULTS[result], "relu").eval()
    extractor = featx.create_feature_extractor(model, ["p", "p.a", "relu"], example_inputs=X4)
    found = extractor(X4)
    feature = first_tensor(found["p"])
    [gradient] = torch.autograd.grad(found["relu"].sum(), feature)
    assert torch.equal(gradient, (feature > 0).float())


class OverwritesPart(nn.Module):
    """Each write reaches what other values see too, so that the model has to go on with the memory itself."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g = self.a(x)
        self.write(g)
        return self.b(g)


def scale_columns(g: torch.Tensor) -> None:
    g[:, :2] *= 3


def scale_flat(g: torch.Tensor) -> None:
    g.view(-1).mul_(3).add_(1)


def add_to_columns_of_what_was_read(g: torch.Tensor) -> None:
    columns = g[:, 1:]
    scale = columns.sigmoid()
    columns += scale


def by_hand(name: str, value: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return what the write that starts at a value leaves of all, by functions that write nothing."""
    if name == "scale_columns":
        return torch.cat([value * 3, g[:, 2:]], 1)
    if name == "scale_flat":
        return (value * 3 + 1).view(g.shape)
    return torch.cat([g[:, :1], value + value.sigmoid()], 1)


@pytest.mark.parametrize(
    ("write", "name"),
    [(scale_columns, "getitem"), (scale_flat, "view"), (add_to_columns_of_what_was_read, "getitem")],
)
@pytest.mark.parametrize("tracer", ["example", "symbolic"])
def test_gradient_with_respect_to_a_part_that_is_overwritten(
    write: Callable[[torch.Tensor], None], name: str, tracer: Literal["example", "symbolic"]
) -> None:
    torch.manual_seed(0)
    model = OverwritesPart(write)
    options: Any = {"example_inputs": X4} if tracer == "example" else {"tracer": "symbolic"}
    extractor = featx.create_feature_extractor(model, [name, "b"], **options)
    found = extractor(X4)
    g = model.a(X4).detach()
    part = {"scale_columns": g[:, :2], "scale_flat": g.view(-1)}
    value = part.get(write.__name__, g[:, 1:]).clone().requires_grad_()
    expected = model.b(by_hand(write.__name__, value, g))
    assert torch.equal(found[name], value)
    assert torch.allclose(found["b"], expected)
    weights = torch.arange(1.0, 1 + expected.numel()).view(expected.shape)
    [gradient] = torch.autograd.grad((found["b"] * weights).sum(), found[name], retain_graph=True)
    [by_functions] = torch.autograd.grad((expected * weights).sum(), value)
    assert torch.allclose(gradient, by_functions)
    [of_weight] = torch.autograd.grad((found["b"] * weights).sum(), model.a.weight)
    [of_weight_of_model] = torch.autograd.grad((model(X4) * weights).sum(), model.a.weight)
    assert torch.equal(of_weight, of_weight_of_model)


def read_by_another_name(a: torch.Tensor) -> torch.Tensor:
    d = a[:, :1]
    a.mul_(2)
    f = a * 10
    d.add_(1)
    return a + f


def read_as_a_view(a: torch.Tensor) -> torch.Tensor:
    b = a.mul_(2)
    s = b.view(-1).sum()
    b.add_(1)
    return a + s


def read_as_what_it_was(a: torch.Tensor) -> torch.Tensor:
    b = a.mul_(2)
    s = a * 3
    b.add_(1)
    return a + s


def written_without_gradients(a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a.mul_(2)
    c = a * 1
    with torch.no_grad():
        a.add_(1)
    return a + c


class Applies(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.a(x) * 1)


# The gradients that each element has by hand, or None where a part of them would be missing.
GRADIENTS: dict[Callable[[torch.Tensor], torch.Tensor], float | None] = {
    read_by_another_name: None,
    read_as_a_view: 1.0 + 12,
    read_as_what_it_was: 4.0,
    written_without_gradients: None,
}


@pytest.mark.parametrize("function", GRADIENTS)
def test_gradients_are_whole_or_missing(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A part of a gradient would be silently wrong; those of weights are as without the request."""
    torch.manual_seed(0)
    model, expected = Applies(function), GRADIENTS[function]
    extractor = featx.create_feature_extractor(model, ["mul_", "output"], example_inputs=X4)
    found = extractor(X4)
    value = model.a(X4).detach() * 2
    assert value.numel() == 12
    assert torch.equal(found["mul_"], value)
    assert torch.equal(found["output"], model(X4))
    [gradient] = torch.autograd.grad(found["output"].sum(), found["mul_"], retain_graph=True, allow_unused=True)
    assert (gradient is None) if expected is None else torch.equal(gradient, torch.full_like(value, expected))
    [of_weight] = torch.autograd.grad(found["output"].sum(), model.a.weight)
    [of_weight_of_model] = torch.autograd.grad(model(X4).sum(), model.a.weight)
    assert torch.equal(of_weight, of_weight_of_model)


class MayBeTheSame(nn.Module):
    """What it copies for three rows is the value itself for one; both are in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        flat = y.t().contiguous().add_(1)
        return y.mul_(2), flat


@pytest.mark.parametrize("others", [[], ["output"]])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_value_that_may_be_memory_of_another_one_in_the_result(rows: int, others: list[str]) -> None:
    torch.manual_seed(0)
    model = MayBeTheSame().eval()
    extractor = featx.create_feature_extractor(model, ["add_", *others], example_inputs=X4)
    found = extractor(X4[:rows])
    assert torch.equal(found["add_"], model.linear(X4[:rows]).t() + 1)
    if others:
        assert all(map(torch.equal, found["output"], model(X4[:rows])))


class CopiesForSomeSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] > 3 else x.clone()


class ReturnsWhatMayBeOverwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.copies = nn.Linear(4, 4), CopiesForSomeSizes()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        z = self.copies(y)
        z.add_(1)
        return z, y


@pytest.mark.parametrize("names", [["copies", "output"], ["linear", "copies", "output"]], ids=" ".join)
@pytest.mark.parametrize("rows", [2, 5])
def test_a_value_in_the_result_that_a_whole_module_returns_for_other_sizes(names: list[str], rows: int) -> None:
    torch.manual_seed(0)
    model = ReturnsWhatMayBeOverwritten().eval()
    x = torch.rand(rows, 4)
    found = featx.create_feature_extractor(model, names, example_inputs=torch.rand(2, 4))(x)
    assert torch.equal(found["copies"], model.linear(x))
    assert all(map(torch.equal, found["output"], model(x)))


class ReturnsItsInputForSomeSizes(nn.Module):
    """In a tuple, a dict, a list, a view or alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        same = x if x.shape[0] > 3 else x.clone()
        other = self.linear(x)
        results = {"tuple": (same, other), "dict": {0: same}, "list": [same, other], "view": [same.view(-1, 4)]}
        return results[self.kind]


class WritesAroundIt(nn.Module):
    """Writes the input of such a call after it, or its result, and reads the other one."""

    def __init__(self, kind: str, writes_input: bool) -> None:
        super().__init__()
        self.first, self.same, self.last = nn.Linear(4, 4), ReturnsItsInputForSomeSizes(kind), nn.Linear(4, 4)
        self.writes_input = writes_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        same = self.same(y)[0]
        written, read = (y, same) if self.writes_input else (same, y)
        written.add_(1)
        return self.last(read)


@pytest.mark.parametrize("writes_input", [True, False])
@pytest.mark.parametrize("kind", ["tuple", "dict", "list", "view"])
@pytest.mark.parametrize("names", [["last"], ["first", "last"]], ids=" ".join)
def test_what_a_whole_module_returns_may_be_its_input_for_other_sizes(
    kind: str, writes_input: bool, names: list[str]
) -> None:
    torch.manual_seed(0)
    model = WritesAroundIt(kind, writes_input).eval()
    for rows, other_rows in ((2, 5), (5, 2)):
        extractor = featx.create_feature_extractor(model, names, example_inputs=torch.rand(rows, 4))
        x = torch.rand(other_rows, 4)
        found = extractor(x)
        assert torch.equal(found["last"], model(x))
        assert "first" not in found or torch.equal(found["first"], model.first(x))


class ReturnsOneTensorTwiceForSomeSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * 2
        return {"read": y, "written": y if x.shape[1] % 2 else y.clone()}


class WritesOneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = ReturnsOneTensorTwiceForSomeSizes(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.twice(x)
        found["written"].mul_(0)
        return self.last(found["read"])


@pytest.mark.slow
def test_items_of_a_result_that_are_one_tensor_on_the_example_alone_are_refused() -> None:
    torch.manual_seed(0)
    model, x = WritesOneOfTwo().eval(), torch.rand(2, 3, 4)
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=x)
    assert torch.equal(extractor(x + 1)["last"], model(x + 1))
    with pytest.raises(featx.SpecializationError, match=r"what 'twice' returns are one tensor"):
        extractor(torch.rand(2, 4, 4))
    adaptive = featx.create_feature_extractor(model, ["last"], example_inputs=x, adaptive=True)
    even = featx.create_feature_extractor(model, ["last"], example_inputs=torch.rand(2, 4, 4))
    for size in (3, 4, 5, 6):
        x = torch.rand(2, size, 4)
        assert torch.equal(adaptive(x)["last"], model(x))
        assert torch.equal(even(x)["last"], model(x))


class AddsInPlace(nn.Module):
    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.way(x)
        x += self.linear(x)
        return x


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("first", [nn.Identity(), nn.Linear(4, 4)], ids=["input", "value"])
@pytest.mark.parametrize(
    "way",
    [lambda x: x, lambda x: x.contiguous(), lambda x: x.float(), lambda x: x.view(-1, 4)],
    ids=["itself", "contiguous", "float", "view"],
)
def test_modules_that_write_one_after_the_other_into_an_input(way: Any, first: nn.Module, grad: bool) -> None:
    model = nn.Sequential(first, AddsInPlace(way), AddsInPlace(way), nn.Linear(4, 2)).eval()
    seen: list[torch.Tensor] = []
    reference = copy.deepcopy(model)
    reference[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.set_grad_enabled(grad):
        extractor = featx.create_feature_extractor(model, ["1", "output"], example_inputs=torch.rand(2, 4))
        x = torch.rand(3, 4)
        expected = reference(x.clone())
        found = extractor(x.clone())
    assert torch.equal(found["1"], seen[0])
    assert torch.equal(found["output"], expected)
