"""Edits: what a model computes if a value inside it were another one, as a forward hook would make it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import featx

X = torch.rand(2, 3, 32, 32)


def twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def shifted(value: torch.Tensor) -> torch.Tensor:
    return value + value.mean(0, keepdim=True)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


def with_hooks(model: nn.Module, edits: dict[str, Callable[[Any], Any]], *paths: str) -> list[Any]:
    """What modules return while forward hooks change what others do."""
    seen: dict[str, Any] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda module, args, output, edit=edit: edit(output))
        for path, edit in edits.items()
    ]
    handles += [
        model.get_submodule(path).register_forward_hook(lambda m, args, out, path=path: seen.update({path: out}))
        for path in paths
    ]
    model(X)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]


def extractor_of(model: nn.Module, nodes: Any, **options: Any) -> featx.DualGraphModule:
    options.setdefault("example_inputs", X)
    extractor = featx.create_feature_extractor(model, nodes, suppress_diff_warning=True, **options)
    assert isinstance(extractor, featx.DualGraphModule)
    return extractor


EDITS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "a stage": {"layer2": twice},
    "inside a block": {"layer2.0.bn1": shifted},
    "several": {"conv1": twice, "layer1.1": shifted, "layer3.0.conv2": featx.zero},
    "one that is asked for": {"layer4": shifted},
}


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize("name", EDITS)
def test_the_model_goes_on_with_what_the_edit_gives(model: nn.Module, name: str, tracer: str) -> None:
    paths = ["layer1", "layer3", "layer4", "fc"]
    options: Any = {"tracer": tracer, "example_inputs": X if tracer == "example" else None}
    extractor = extractor_of(model, paths, edits=EDITS[name], **options)
    expected = with_hooks(model, EDITS[name], *paths)
    for each in (extractor, copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        found = each(X)
        assert list(found) == paths
        assert all(map(torch.equal, found.values(), expected))
    assert torch.equal(model(X), with_hooks(model, {}, "fc")[0])


@pytest.mark.slow
def test_gradients_flow_through_edits(model: nn.Module) -> None:
    extractor = extractor_of(model, ["layer4"], edits={"layer2": twice})
    model.zero_grad()
    with_hooks(model, {"layer2": twice}, "layer4")[0].sum().backward()
    expected = model.conv1.weight.grad.clone()
    model.zero_grad()
    extractor(X)["layer4"].sum().backward()
    assert torch.equal(model.conv1.weight.grad, expected)


@pytest.mark.slow
def test_a_recorded_value_takes_the_place_of_another(model: nn.Module) -> None:
    other = torch.rand(2, 3, 32, 32)
    [recorded] = with_hooks(model, {}, "layer2")
    extractor = extractor_of(model, ["layer2", "fc"], edits={model.layer2: recorded.detach()})
    found = extractor(other)
    assert torch.equal(found["layer2"], recorded)
    assert torch.equal(found["fc"], with_hooks(model, {}, "fc")[0])
    with pytest.raises(featx.RequestError, match=r"of shape \(2, 128, 4, 4\); the value has \(3, 128, 4, 4\)"):
        extractor(torch.rand(3, 3, 32, 32))


@pytest.mark.slow
def test_patterns_and_classes(model: nn.Module) -> None:
    extractor = extractor_of(model, ["fc"], edits={"layer[12].*.bn2": twice, nn.MaxPool2d: shifted})
    edits: dict[str, Any] = {f"layer{stage}.{block}.bn2": twice for stage in (1, 2) for block in (0, 1)}
    assert torch.equal(extractor(X)["fc"], with_hooks(model, {**edits, "maxpool": shifted}, "fc")[0])


def test_operations_and_values_that_are_written_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.relu(self.conv(x))
            z = y * 3
            return z + y

    model = InPlace().eval()
    conv = model.conv(X)
    found = extractor_of(model, ["conv", "output"], edits={"conv": lambda value: -value})(X)
    assert torch.equal(found["conv"], -conv)
    y = torch.relu(-conv)
    assert torch.equal(found["output"], y * 3 + y)
    found = extractor_of(model, ["output", "mul"], edits={"mul": featx.zero})(X)
    assert torch.equal(found["output"], torch.relu(conv))
    assert not found["mul"].any()


@pytest.mark.slow
def test_an_edit_that_would_change_a_decision_is_refused_when_it_runs() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_positive = x.sum() > 0
            if is_positive:
                x = x * 2
            return self.last(x)

    model = Decides().eval()
    for edits in ({"gt": torch.logical_not}, {"sum": torch.neg}):
        extractor = extractor_of(model, ["last"], edits=edits)
        with pytest.raises(featx.SpecializationError):
            extractor(X)
    same = extractor_of(model, ["last"], edits={"gt": torch.clone, "sum": twice})
    assert torch.equal(same(X)["last"], X * 2)


def test_an_edit_that_gives_something_else_than_a_tensor_is_refused() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.block(x)
            return self.last(y[0] if isinstance(y, tuple) else y)

    extractor = extractor_of(Looks().eval(), ["last"], edits={"block": lambda value: (value, value)})
    with pytest.raises(featx.RequestError, match=r"edit of 'block' returned a tuple of 2.*it returns a tensor"):
        extractor(X)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tuple, list])
def test_modules_that_return_containers(kind: Any) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return kind([self.a(x), self.b(x)])

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.last = Pair(), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.pair(x)
            return self.last(a * b)

    model = Uses().eval()
    swap = lambda value: kind([value[1] + 1, value[0]])  # noqa: E731
    [expected] = with_hooks(model, {"pair": swap}, "last")
    for nodes in (["last"], ["last", "pair.a"]):
        assert torch.equal(extractor_of(model, nodes, edits={"pair": swap})(X)["last"], expected)
    zeros = extractor_of(model, ["last", "pair.b"], edits={"pair": featx.zero})(X)
    assert torch.equal(zeros["last"], model.last(torch.zeros_like(X)))
    assert torch.equal(zeros["pair.b"], model.pair.b(X))


@dataclasses.dataclass
class Parts:
    first: torch.Tensor
    others: Any = None


STRUCTURES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nested tuples": (
        lambda a, b: (a, (b, [a + b])), lambda out: out[0] * out[1][0] + out[1][1][0],
        lambda out: (out[0] + 1, (out[1][0] * 2, [out[1][1][0] - 1])),
    ),
    "a dict of tuples": (
        lambda a, b: {"a": (a,), "b": b}, lambda out: out["a"][0] * out["b"],
        lambda out: {"a": (out["b"],), "b": out["a"][0] + 1},
    ),
    "a dataclass": (
        lambda a, b: Parts(a, b), lambda out: out.first * out.others, lambda out: Parts(out.others + 1, out.first)
    ),
    "a dataclass with a tuple": (
        lambda a, b: Parts(a, (a * b, b)), lambda out: out.first * out.others[1] + out.others[0],
        lambda out: Parts(out.first + 1, (out.others[1], out.others[0] * 3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("opened", [False, True])
def test_parts_of_what_an_edit_returns_are_gone_on_with(name: str, opened: bool) -> None:
    make, use, edit = STRUCTURES[name]

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return make(self.a(x), self.b(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Inner(), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(use(self.inner(x)))

    model = Outer().eval()
    [expected] = with_hooks(model, {"inner": edit}, "last")
    found = extractor_of(model, ["last", "inner.b"] if opened else ["last"], edits={"inner": edit})(X)
    assert torch.equal(found["last"], expected)
    assert not torch.equal(found["last"], model(X))


@pytest.mark.parametrize("nodes", [["mul"], ["mul", "inner.exp"]])
def test_one_tensor_in_two_places_cannot_be_edited_apart(nodes: list[str]) -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.exp()
            return y, y

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.inner(x)
            return a * b

    extractor = extractor_of(Outer(), nodes, edits={"inner": lambda out: (out[0] + 1, out[1])})
    with pytest.raises(featx.RequestError, match="'inner' returns one tensor in two places"):
        extractor(X)


@pytest.mark.slow
def test_patterns_of_operations(model: nn.Module) -> None:
    found = extractor_of(model, ["output"], edits={"layer[12].*.add": featx.zero})(X)
    each = {f"layer{stage}.{block}.add": featx.zero for stage in (1, 2) for block in (0, 1)}
    assert torch.equal(found["output"], extractor_of(model, ["output"], edits=each)(X)["output"])
    # After the zeros of layer2.1.add there is its relu alone.
    zeros = model.layer4(model.layer3(torch.zeros(2, 128, 4, 4)))  # type: ignore[operator]
    assert torch.equal(found["output"], model.fc(zeros.mean((2, 3))))  # type: ignore[operator]


@pytest.mark.sweep
@pytest.mark.parametrize("nodes", [["output"], ["output", "encoder.layer.0"]])
def test_outputs_of_transformers(nodes: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    bert = transformers.BertModel(config).eval()
    batch = {"input_ids": torch.randint(0, 50, (2, 6))}

    def edit(output: Any) -> Any:
        return type(output)(last_hidden_state=output.last_hidden_state * 2)

    extractor = extractor_of(bert, nodes, example_inputs=batch, edits={"encoder": edit})
    handle = bert.encoder.register_forward_hook(lambda module, args, output: edit(output))
    expected = bert(**batch)
    handle.remove()
    found = extractor(**batch)["output"]
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(found.pooler_output, expected.pooler_output)


@pytest.mark.parametrize(
    ("edits", "kind", "message"),
    [
        (["layer1"], featx.ArgumentTypeError, "must be a dict"),
        ({"layer1": 3}, featx.ArgumentTypeError, "a function or module that gets the value, or a tensor"),
        ({"layer1": nn.ReLU}, featx.ArgumentTypeError, "a function or module that gets the value, or a tensor"),
        (
            {"layer1": lambda module, args, output: output},
            featx.ArgumentTypeError,
            "edit of 'layer1' takes.*value alone",
        ),
        ({"layer9": twice}, featx.NodeNameError, "No node 'layer9'"),
        ({"layer1": twice, "layer*": twice}, featx.RequestError, "two edits are of 'layer1'"),
        ({"layr*": twice}, featx.NodeNameError, "matches no module and no operation"),
        ({"layer1.*.add": twice, "layer1.0.add": twice}, featx.RequestError, r"two edits are of 'layer1\.0\.add'"),
    ],
    ids=["a list", "a number", "a class", "a hook", "no node", "twice", "no match", "twice an operation"],
)
def test_what_is_no_edit_is_refused(model: nn.Module, edits: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        extractor_of(model, ["fc"], edits=edits)


@pytest.mark.parametrize("kind", ["zero", "tensor", "lambda"])
def test_scripting_an_edited_extractor_says_that_it_cannot(kind: str) -> None:
    edit: Any = {"zero": featx.zero, "tensor": torch.zeros(2, 3), "lambda": lambda value: value * 2}[kind]
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval(), torch.rand(2, 3)
    extractor = featx.create_feature_extractor(model, ["1"], edits={"0": edit}, example_inputs=x)
    with pytest.raises(featx.ScriptError, match=r"edit of featx|source of a lambda"):
        torch.jit.script(extractor)


class PairBlock(nn.Module):
    """Returns a tensor and None, as attentions of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = Pair(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, weights = self.attention(x)
        assert weights is None
        return self.last(x + value)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.proj(x), None


def test_zero_leaves_what_is_no_tensor() -> None:
    model, x = PairBlock().eval(), torch.rand(2, 3)
    extractor = featx.create_feature_extractor(model, ["last"], edits={"attention": featx.zero}, example_inputs=x)
    assert torch.equal(extractor(x)["last"], model.last(x))


def test_input_of_an_extractor_is_not_edited() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    with pytest.raises(featx.RequestError, match="'1' is among the inputs"):
        featx.create_feature_extractor(
            model, ["2"], inputs=["1"], edits={"1": featx.zero}, example_inputs=torch.rand(1, 3)
        )


@pytest.mark.parametrize(("edited", "options"), [("3", {}), ("0", {"inputs": ["1"]})])
def test_an_edit_that_changes_nothing_that_is_requested_is_refused(edited: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(featx.RequestError, match=f"the edit of '{edited}' changes nothing that is requested"):
        featx.create_feature_extractor(
            model, ["2"], edits={edited: featx.zero}, example_inputs=torch.rand(2, 4), **options
        )


def zeroed_in_place(value: torch.Tensor) -> torch.Tensor:
    value[:, 0] = 0
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [(lambda value: None, "the edit of 'layer2' returned None"), (zeroed_in_place, "let it change a copy")],
    ids=["nothing", "in place"],
)
@pytest.mark.parametrize("nodes", [["layer3"], ["layer2.1", "layer3"]], ids=str)
def test_an_edit_that_returns_nothing_or_writes_what_it_was_given_is_told_to(
    model: nn.Module, edit: Any, message: str, nodes: list[str]
) -> None:
    extractor = extractor_of(model, nodes, edits={"layer2": edit})
    with pytest.raises(featx.RequestError, match=message):
        extractor(X)
    with torch.inference_mode():
        expected = with_hooks(model, {"layer2": lambda value: zeroed_in_place(value.clone())}, *nodes[-1:])
        copied = extractor_of(model, nodes, edits={"layer2": lambda value: zeroed_in_place(value.clone())})
        assert torch.equal(copied(X)[nodes[-1]], expected[0])


@pytest.mark.slow
def test_an_edited_extractor_is_compiled_whole(model: nn.Module) -> None:
    extractor = extractor_of(model, ["layer2"], edits={"layer1": twice})
    compiled = torch.compile(extractor, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X)["layer2"], extractor(X)["layer2"])


@pytest.mark.slow
def test_a_mean_is_repeated_along_the_batch(model: nn.Module) -> None:
    images = torch.rand(4, 3, 32, 32)
    mean = featx.create_feature_extractor(model, ["layer1"])(images)["layer1"].mean((0, 2, 3), keepdim=True).detach()
    edited = featx.create_feature_extractor(model, ["layer2"], edits={"layer1": mean})(images)["layer2"]
    handle = model.get_submodule("layer1").register_forward_hook(lambda module, args, value: mean.expand_as(value))
    expected: list[torch.Tensor] = []
    other = model.get_submodule("layer2").register_forward_hook(lambda module, args, value: expected.append(value))
    model(images)
    handle.remove()
    other.remove()
    assert torch.equal(edited, expected[0])


def test_a_tensor_of_other_lengths_is_refused(model: nn.Module) -> None:
    extractor = featx.create_feature_extractor(model, ["layer2"], edits={"layer1": torch.zeros(2, 64, 8, 8)})
    with pytest.raises(featx.RequestError, match="as many places as the value, or one"):
        extractor(torch.rand(4, 3, 32, 32))


@pytest.mark.slow
def test_a_module_is_a_part_of_the_extractor(model: nn.Module) -> None:
    torch.manual_seed(0)
    coder = nn.Sequential(nn.Conv2d(64, 8, 1), nn.ReLU(), nn.Conv2d(8, 64, 1))
    images = torch.rand(2, 3, 32, 32)
    extractor = featx.create_feature_extractor(model, ["layer2"], edits={"layer1": coder})
    by_function = featx.create_feature_extractor(model, ["layer2"], edits={"layer1": lambda value: coder(value)})
    value = extractor(images)["layer2"]
    assert torch.equal(value, by_function(images)["layer2"])
    value.sum().backward()
    assert all(weight.grad is not None for weight in coder.parameters())
    mine = {id(weight) for weight in extractor.parameters()}
    assert mine.issuperset(map(id, coder.parameters()))
    twin = copy.deepcopy(extractor)
    assert torch.equal(twin(images)["layer2"], value)
    with pytest.raises(featx.ArgumentTypeError, match="a function that calls the module"):
        featx.create_feature_extractor(model, ["layer2"], edits={"layer1": coder}, adaptive=True)


@pytest.mark.slow
def test_one_module_edits_several_values(model: nn.Module) -> None:
    images = torch.rand(2, 3, 32, 32)
    double = nn.LeakyReLU(negative_slope=2.0)
    extractor = featx.create_feature_extractor(model, ["layer4"], edits={"layer[12].*.bn1": double})
    by_function = featx.create_feature_extractor(
        model, ["layer4"], edits={"layer[12].*.bn1": lambda value: torch.nn.functional.leaky_relu(value, 2.0)}
    )
    assert torch.equal(extractor(images)["layer4"], by_function(images)["layer4"])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.value(x), None


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = _Attention(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x)
        return self.last(x + y)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (torch.zeros(2, 8), r"is a tensor, and the value is a tuple of 2; .*lambda value: \(tensor, \*value\[1:\]\)"),
        (lambda value: value * 2, r"returned a tuple of 4, and gets a tuple of 2; .*\*value\[1:\]"),
        (lambda value: value[0] * 2, "returned a Tensor, and gets a tuple of 2"),
    ],
    ids=["a tensor", "twice as many", "its first part"],
)
def test_an_edit_of_a_tuple_is_told_to_give_its_parts(edit: Any, message: str) -> None:
    x = torch.rand(2, 8)
    extractor = extractor_of(_Layer().eval(), ["last"], edits={"attention": edit}, example_inputs=x)
    with pytest.raises(featx.RequestError, match=message):
        extractor(x)


def test_a_part_of_a_tuple_is_edited() -> None:
    x, model = torch.rand(2, 8), _Layer().eval()
    edit = lambda value: (value[0] * 2, *value[1:])  # noqa: E731
    extractor = extractor_of(model, ["last"], edits={"attention": edit}, example_inputs=x)
    assert torch.equal(extractor(x)["last"], model.last(x + model.attention(x)[0] * 2))


class Keeps(nn.Module):
    """Puts what it returns where others find it: in a list that it is given, in a dict, or in an attribute."""

    def __init__(self, where: str, returns_tuple: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.where, self.returns_tuple = where, returns_tuple
        self.kept: Any = None

    def forward(self, x: torch.Tensor, found: Any) -> Any:
        y = self.norm(self.conv(x))
        if self.where == "a list":
            found.append(y)
        elif self.where == "a dict":
            found["y"] = y
        else:
            self.kept = y
        return (y, x + 1) if self.returns_tuple else y


class ReadsKept(nn.Module):
    def __init__(self, where: str, returns_tuple: bool) -> None:
        super().__init__()
        self.first, self.last = Keeps(where, returns_tuple), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: Any = [] if self.first.where == "a list" else {}
        y = self.first(x, found)
        kept = {"a list": lambda: found[0], "a dict": lambda: found["y"]}.get(
            self.first.where, lambda: self.first.kept
        )()
        return self.last(y[0] * y[1] if self.first.returns_tuple else y) + kept * 5


@pytest.mark.parametrize("others", [[], ["first.norm"], ["first.conv"]], ids=" ".join)
@pytest.mark.parametrize("returns_tuple", [False, True])
@pytest.mark.parametrize("where", ["a list", "a dict", "an attribute"])
def test_an_edit_of_a_module_is_of_what_it_returns_alone(where: str, returns_tuple: bool, others: list[str]) -> None:
    def edit(value: Any) -> Any:
        return (value[0] * 2, value[1]) if returns_tuple else value * 2

    model = ReadsKept(where, returns_tuple).eval()
    expected = with_hooks(copy.deepcopy(model), {"first": edit}, *others, "last")
    model_output = copy.deepcopy(model)
    model_output.first.register_forward_hook(lambda _, __, value: edit(value))
    found = extractor_of(model, [*others, "last", "output"], edits={"first": edit})(X)
    assert all(torch.equal(found[name], value) for name, value in zip([*others, "last"], expected, strict=True))
    assert torch.equal(found["output"], model_output(X))
    assert not torch.equal(found["output"], model(X))


@pytest.mark.parametrize("where", ["a list", "a dict"])
def test_so_it_is_in_a_symbolic_trace(where: str) -> None:
    model = ReadsKept(where, returns_tuple=False).eval()
    edited = copy.deepcopy(model)
    edited.first.register_forward_hook(lambda _, __, value: value * 2)
    extractor = featx.create_feature_extractor(
        model, ["output"], edits={"first": lambda value: value * 2}, tracer="symbolic"
    )
    assert torch.equal(extractor(X)["output"], edited(X))


class CalledTwice(nn.Module):
    """Calls a block, and an activation, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.relu, self.last = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()), nn.ReLU(), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.block(self.relu(self.block(x)) - 0.5)))


@pytest.mark.parametrize("others", [[], ["block.0"], ["block.1"]], ids=" ".join)
@pytest.mark.parametrize("name", ["block", "relu", "block.1"])
@pytest.mark.parametrize("options", [{}, {"tracer": "symbolic", "example_inputs": None}], ids=["example", "symbolic"])
def test_an_edit_of_a_module_is_of_each_call(name: str, others: list[str], options: Any) -> None:
    model = CalledTwice().eval()
    edited = copy.deepcopy(model)
    edited.get_submodule(name).register_forward_hook(lambda _, __, value: value * 0.5 + 0.1)
    found = extractor_of(model, [*others, "output"], edits={name: lambda value: value * 0.5 + 0.1}, **options)(X)
    assert torch.equal(found["output"], edited(X))


def test_an_edit_of_one_call_is_asked_for_by_its_number() -> None:
    model = CalledTwice().eval()
    hidden = model.relu(model.block(X)) - 0.5
    found = extractor_of(model, ["output"], edits={"relu_1": lambda value: value * 0.5})(X)
    assert torch.equal(found["output"], model.last(model.relu(model.block(hidden)) * 0.5))


class Outer(nn.Module):
    """Uses what its block returned, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        y = self.block(x)
        found.append(self.norm(y))
        return y


class OfOuter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.last = Outer(), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        y = self.outer(x, found)
        return self.last(y) + found[0]


@pytest.mark.parametrize("others", [[], ["outer.block"], ["outer.norm", "outer.block.0"]], ids=" ".join)
@pytest.mark.parametrize(
    "names", [["outer"], ["outer.block"], ["outer", "outer.block"], ["outer", "outer.block", "outer.block.1"]],
    ids=" ".join,
)  # fmt: skip
def test_edits_of_a_module_and_of_what_is_inside(names: list[str], others: list[str]) -> None:
    model = OfOuter().eval()
    edits = {name: lambda value, factor=factor: value * factor for factor, name in enumerate(names, 2)}
    edited = copy.deepcopy(model)
    for name, edit in edits.items():
        edited.get_submodule(name).register_forward_hook(lambda _, __, value, edit=edit: edit(value))
    found = extractor_of(model, [*others, "output"], edits=edits)(X)
    assert torch.equal(found["output"], edited(X))


def test_two_edits_of_one_value_are_refused() -> None:
    edits = {"last": lambda value: value * 2, "output": lambda value: value + 1}
    with pytest.raises(featx.RequestError, match="'last' and 'output' are one value, and both are edited"):
        extractor_of(CalledTwice().eval(), ["output"], edits=edits)


def test_what_comes_out_is_described_with_the_edits() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)).eval()
    x = torch.rand(2, 3, 16, 16)
    extractor = featx.create_feature_extractor(
        model,
        ["0", "1", "2"],
        example_inputs=x,
        edits={"0": lambda value: nn.functional.interpolate(value, scale_factor=2), "2": lambda value: value[:, :3]},
    )
    found = extractor(x)
    assert [info.shape for info in extractor.feature_info] == [tuple(value.shape) for value in found.values()]
    assert extractor.channels == [8, 8, 3]


@pytest.mark.slow
def test_pool_of_a_class_token_that_an_edit_has_taken_away_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    x = torch.rand(1, 3, 64, 64)
    wanted = {"blocks.1": featx.Feature("tokens", pool="cls")}
    kept = featx.create_feature_extractor(model, wanted, example_inputs=x, edits={"blocks.0": lambda value: value * 2})
    assert kept(x)["tokens"].shape == (1, 192)
    with pytest.raises(featx.RequestError, match="has no class token"):
        featx.create_feature_extractor(model, wanted, example_inputs=x, edits={"blocks.0": lambda value: value[:, 1:]})
