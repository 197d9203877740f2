"""Requests by patterns, modules and classes, and of what the model returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx
from featx.features.requests.request import as_request

X = torch.rand(2, 3, 32, 32)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


def extracted(model: nn.Module, nodes: Any, **options: Any) -> dict[str, Any]:
    return featx.create_feature_extractor(model, nodes, suppress_diff_warning=True, **options)(X)


def hooked(model: nn.Module, *paths: str) -> list[torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda m, args, out, path=path: seen.update({path: out.clone()})
        )
        for path in paths
    ]
    model(X)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]


CONV2 = [f"layer{stage}.{block}.conv2" for stage in (1, 2, 3, 4) for block in (0, 1)]
REQUESTS: dict[str, tuple[Any, list[str], list[str]]] = {
    "one part": (["layer*"], ["layer1", "layer2", "layer3", "layer4"], ["layer1", "layer2", "layer3", "layer4"]),
    "key": ({"layer*": "C*"}, ["layer1", "layer2", "layer3", "layer4"], ["C1", "C2", "C3", "C4"]),
    "class of characters": ({"layer[34].*.conv2": "c*_*"}, CONV2[4:], ["c3_0", "c3_1", "c4_0", "c4_1"]),
    "not one of these": (["layer[!12]"], ["layer3", "layer4"], ["layer3", "layer4"]),
    "joined": ({"layer[4].*.conv2": "c*"}, CONV2[6:], ["c4.0", "c4.1"]),
    "one character": (["layer?.1"], [f"layer{i}.1" for i in range(1, 5)], [f"layer{i}.1" for i in range(1, 5)]),
    "any parts": (["**.conv2"], CONV2, CONV2),
    "a name first": ({"layer2": "two", "layer*": "C*"}, ["layer2", "layer1", "layer3"], ["two", "C1", "C3"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_patterns_match_paths_of_modules(model: nn.Module, name: str) -> None:
    request, paths, keys = REQUESTS[name]
    found = extracted(model, request)
    if name == "a name first":
        assert list(found) == ["two", "C1", "C3", "C4"]
    else:
        assert list(found) == keys
    for key, expected in zip(keys, hooked(model, *paths), strict=True):
        assert torch.equal(found[key], expected)


@pytest.mark.slow
def test_a_pattern_that_matches_no_module_matches_operations(model: nn.Module) -> None:
    found = extracted(model, {"layer[12].*.add": "sum*_*"})
    assert list(found) == ["sum1_0", "sum1_1", "sum2_0", "sum2_1"]
    alone = extracted(model, ["layer2.0.add"])
    assert torch.equal(found["sum2_0"], alone["layer2.0.add"])


@pytest.mark.slow
def test_modules_and_classes(model: nn.Module) -> None:
    found = extracted(model, {model.layer4: "C5", nn.MaxPool2d: "pool"})
    assert list(found) == ["C5", "pool"]
    assert all(map(torch.equal, found.values(), hooked(model, "layer4", "maxpool")))
    found = extracted(model, [nn.MaxPool2d, model.layer1, "conv1"])
    assert list(found) == ["maxpool", "layer1", "conv1"]
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert list(extracted(model, {nn.BatchNorm2d: "norm of *"})) == [f"norm of {path}" for path in norms]


def test_modules_that_do_not_run_are_left_out_of_patterns() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Dropout(), nn.Tanh()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[3](self.parts[0](x))
            return self.parts[2](x) if self.training else x

    model = Parts().eval()
    extractor = featx.create_feature_extractor(model, ["parts.*"], example_inputs=X, suppress_diff_warning=True)
    assert list(extractor(X)) == ["parts.0", "parts.3"]
    assert list(extractor.train()(X)) == ["parts.0", "parts.2", "parts.3"]
    with pytest.raises(featx.NodeNameError, match=r"No node 'parts.1'.*which 'parts.\[1\]' matches"):
        featx.create_feature_extractor(model, ["parts.[1]"], example_inputs=X)


@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize(
    "result",
    [lambda x, y: y, lambda x, y: (x, y), lambda x, y: {"x": x, "y": [y]}, lambda x, y: x, lambda x, y: y.relu_()],
)
def test_output_is_what_the_model_returns(result: Any, tracer: Any) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return result(x, self.conv(x))

    model = Returns().eval()
    options: Any = {"tracer": tracer} if tracer == "symbolic" else {"example_inputs": X}
    found = extracted(model, ["output", "conv"], **options)
    assert list(found) == ["output", "conv"]
    torch.testing.assert_close(found["output"], model(X), rtol=0, atol=0)
    assert torch.equal(found["conv"], model.conv(X))


def test_output_is_a_module_of_that_name_where_there_is_one() -> None:
    model = nn.Sequential()
    model.add_module("output", nn.Conv2d(3, 3, 1))
    model.add_module("last", nn.ReLU())
    assert torch.equal(extracted(model.eval(), ["output"], example_inputs=X)["output"], model.output(X))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a function": ([print], featx.ArgumentTypeError, "may have names, modules of the model and classes"),
    "a fraction as a key": (
        {"layer2": 2.5},
        featx.ArgumentTypeError,
        "must give texts, a featx.Feature or a list.*2.5",
    ),
    "None as a key": (
        {"layer1": None},
        featx.ArgumentTypeError,
        "must give texts, a featx.Feature or a list of them as keys, got None",
    ),
    "a set, without an order": ({"layer1", "layer2"}, featx.ArgumentTypeError, "is a set, which has no order"),
    "a number": ([1], featx.ArgumentTypeError, "may have names"),
    "another class": ([str], featx.ArgumentTypeError, "may have names"),
    "the wrong way round": ({"C3": "layer2"}, featx.NodeNameError, r"from names to keys: \{'layer2': 'C3'\}"),
    "a module of another model": ([nn.ReLU()], featx.RequestError, "a ReLU that is no part of the model"),
    "a class that is not there": ([nn.Conv3d], featx.NodeNameError, "Conv3d, and the model has no such module"),
    "nothing near": (["layr*"], featx.NodeNameError, "'layr\\*' in return_nodes matches no module.*'layer4'"),
    "a container of another name": (["units.*"], featx.NodeNameError, r"Near are 'layer1\.\*', 'layer2\.\*'"),
    "one key for several": ({"layer*": "C"}, featx.RequestError, r"to all 4 values.*'C\*'"),
    "one key twice": ({"layer1": ["a", "a"]}, featx.RequestError, "the key 'a' to 'layer1' twice"),
    "no key in a list": ({"layer1": []}, featx.ArgumentTypeError, "or a list of them as keys"),
    "a fraction in a list": ({"layer1": ["a", 2.5]}, featx.ArgumentTypeError, "or a list of them as keys"),
    "one of several keys for several": ({"layer*": ["C*", "D"]}, featx.RequestError, r"to all 4 values.*'D\*'"),
    "one key for two": ({"layer1": "a", "conv1": "a"}, featx.RequestError, "the key 'a' to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_request_is_refused(model: nn.Module, name: str) -> None:
    request, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        featx.create_feature_extractor(model, request, example_inputs=X)


def test_names_with_the_characters_of_patterns_are_names_where_a_module_has_them() -> None:
    model = nn.Sequential()
    model.add_module("a*", nn.ReLU())
    model.add_module("ab", nn.ReLU())
    assert dict(as_request(["a*"], "return_nodes", model)) == {"a*": "a*"}
    assert dict(as_request(["a?"], "return_nodes", model)) == {"a*": "a*", "ab": "ab"}


@pytest.mark.slow
def test_the_result_has_the_order_of_the_request_with_patterns_of_operations() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.rand(1, 3, 32, 32)
    nodes = {"layer4": "last", "layer[12].0.add": "sum *", "conv1": "first", "layer3.*.add": "later *", "output": "out"}
    extractor = featx.create_feature_extractor(model, nodes, example_inputs=x)
    keys = ["last", "sum 1", "sum 2", "first", "later 0", "later 1", "out"]
    assert list(extractor(x)) == [info.key for info in extractor.feature_info] == keys


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_one_value_under_two_keys_is_refused(order: int) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    wishes = [("layer4", "raw"), (model.layer4, featx.Feature("pooled", pool="avg"))][::order]
    with pytest.raises(featx.RequestError, match="asks for 'layer4' twice, by its name or by the module"):
        as_request(dict(wishes), "return_nodes", model)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_", [{"**": "*"}, {nn.Dropout: "*"}, [nn.Module], ["encoder.layer.*.attention.self.*"]]
)
def test_a_pattern_leaves_out_modules_that_do_not_run(request_: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    model = transformers.BertModel(config).eval()  # its fused attention calls no dropout
    ids = torch.randint(0, 9, (2, 5))
    extractor = featx.create_feature_extractor(model, request_, example_inputs={"input_ids": ids}).eval()
    values: dict[str, Any] = {}
    for path, module in model.named_modules():
        module.register_forward_hook(lambda _, inputs, value, path=path: values.update({path: value}))
    model(ids)
    found = extractor(input_ids=ids)
    assert "encoder.layer.0.attention.self.dropout" not in found
    tensors = {key: value for key, value in found.items() if isinstance(values.get(key), torch.Tensor)}
    assert len(tensors) > 3
    assert all(torch.equal(value, values[key]) for key, value in tensors.items())


@pytest.mark.parametrize("key", [[featx.Feature("C", pool="avg")], (featx.Feature("C", pool="avg"),)])
def test_a_list_of_one_feature_does_what_the_feature_says(key: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    x = torch.rand(2, 3, 5, 5)
    found = featx.create_feature_extractor(model, {"0": key}, example_inputs=x)(x)
    torch.testing.assert_close(found["C"], model[0](x).mean((2, 3)))


def test_a_value_that_two_patterns_match_is_returned_for_each() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3))).eval()
    x = torch.rand(2, 3, 5, 5)
    request: Any = {
        "*": featx.Feature("avg *", pool="avg"),
        "[02]": featx.Feature("max *", pool="max"),
        nn.Conv2d: "* whole",
    }
    found = featx.create_feature_extractor(model, request, example_inputs=x)(x)
    value = x
    expected: dict[str, torch.Tensor] = {}
    for place, layer in enumerate(model):
        value = layer(value)
        expected[f"avg {place}"], expected[f"{place} whole"] = value.mean((2, 3)), value
        if place in (0, 2):
            expected[f"max {place}"] = value.amax((2, 3))
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        torch.testing.assert_close(found[key], each)
    assert list(featx.create_feature_extractor(model, ["*", "[02]"], example_inputs=x)(x)) == ["0", "1", "2"]


class HasOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.output(x))


def test_the_model_itself_is_what_it_returns_also_where_a_child_is_called_output() -> None:
    torch.manual_seed(0)
    model, x = HasOutput().eval(), torch.randn(2, 4)
    child = featx.create_feature_extractor(model, ["output"], example_inputs=x)(x)
    whole = featx.create_feature_extractor(model, {"output": "child", model: "whole"}, example_inputs=x)(x)
    assert torch.equal(child["output"], model.output(x))
    assert torch.equal(whole["child"], model.output(x))
    assert torch.equal(whole["whole"], model(x))
    listed = featx.create_feature_extractor(model, [model], example_inputs=x)(x)
    assert list(listed) == ["output"]
    assert torch.equal(listed["output"], model(x))


def test_the_model_itself_is_what_it_returns_also_where_an_input_is_called_output() -> None:
    class Loss(nn.Module):
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output - target).pow(2).mean()

    model, output, target = Loss().eval(), torch.rand(2, 4), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, {model: "loss", "output": "x"}, example_inputs=(output, target))
    found = extractor(output, target)
    assert torch.equal(found["loss"], model(output, target))
    assert torch.equal(found["x"], output)


@pytest.mark.slow
def test_the_model_itself_is_its_output_for_edits_and_inputs_too(model: nn.Module) -> None:
    doubled = extracted(model, [model], edits={model: lambda value: value * 2})
    assert torch.equal(doubled["output"], model(X) * 2)
    assert torch.equal(extracted(model, {model: "logits"})["logits"], model(X))
