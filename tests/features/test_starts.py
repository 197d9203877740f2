"""inputs: an extractor that starts in the middle of a model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx

X = torch.rand(2, 3, 64, 96)


@pytest.fixture(scope="module")
def resnet() -> Any:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


def started(model: nn.Module, nodes: Any, inputs: Any, example: Any = X, **options: Any) -> featx.DualGraphModule:
    extractor = featx.create_feature_extractor(
        model, nodes, inputs=inputs, example_inputs=example, suppress_diff_warning=True, **options
    )
    assert isinstance(extractor, featx.DualGraphModule)
    return extractor


def values(model: nn.Module, *paths: str, x: Any = X) -> list[torch.Tensor]:
    """Return copies of what modules return, as hooks see it."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda _, args, output, path=path: seen.update({path: output.clone()})
        )
        for path in paths
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["maxpool", "layer1", "layer2", "layer3.0", "layer4.0.bn1", "avgpool"])
def test_it_goes_on_as_the_model_does(resnet: nn.Module, start: str) -> None:
    (value,) = values(resnet, start)
    if start == "layer4.0.bn1":  # the shortcut of the block goes around it
        extractor = started(resnet, ["output"], [start, "layer3"])
        found = extractor(value, *values(resnet, "layer3"))
    else:
        extractor = started(resnet, ["output"], [start])
        found = extractor(value)
    assert torch.equal(found["output"], resnet(X))


def test_it_has_only_what_comes_behind(resnet: nn.Module) -> None:
    extractor = started(resnet, ["output"], ["layer3"])
    assert {name.split(".")[0] for name, _ in extractor.named_parameters()} == {"layer4", "fc"}
    assert extractor(values(resnet, "layer3")[0])["output"].shape == (2, 1000)
    assert extractor.free_dims is None


def test_other_sizes(resnet: nn.Module) -> None:
    extractor = started(resnet, ["layer4", "output"], ["layer2"])
    x = torch.rand(5, 3, 96, 32)
    value, expected = values(resnet, "layer2", "layer4", x=x)
    assert torch.equal(extractor(value)["layer4"], expected)


def test_what_is_given_stays_as_it_is(resnet: nn.Module) -> None:
    # bn1 is followed by a relu that writes it.
    (value,) = values(resnet, "bn1")
    before = value.clone()
    extractor = started(resnet, ["output"], ["bn1"])
    assert torch.equal(extractor(value)["output"], resnet(X))
    assert torch.equal(value, before)


def test_parameters_have_names(resnet: nn.Module) -> None:
    extractor = started(resnet, {"output": "logits"}, {"layer2": "c3"})
    (value,) = values(resnet, "layer2")
    assert torch.equal(extractor(c3=value)["logits"], resnet(X))
    by_module = started(resnet, ["output"], [resnet.layer2])  # type: ignore[index]
    assert torch.equal(by_module(layer2=value)["output"], resnet(X))


def test_the_list_of_what_has_to_be_given(resnet: nn.Module) -> None:
    with pytest.raises(
        featx.RequestError, match=r"from 'layer3\.0\.bn2' alone; inputs must have 'layer3\.0\.downsample' too"
    ):
        started(resnet, ["output"], ["layer3.0.bn2"])
    with pytest.raises(featx.RequestError, match="'layer1' is requested and does not follow from 'layer2'"):
        started(resnet, ["layer1", "output"], ["layer2"])
    # What it names is enough.
    extractor = started(resnet, ["output"], ["layer3.0.bn2", "layer3.0.downsample"])
    given = values(resnet, "layer3.0.bn2", "layer3.0.downsample")
    assert torch.equal(extractor(*given)["output"], resnet(X))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down(x)
        b = self.mid(a)
        return self.up(b) * a + x.shape[0]


def test_inputs_of_the_model_may_stay() -> None:
    model, x = Skip(), torch.rand(3, 4)
    with pytest.raises(featx.RequestError, match=r"inputs must have ('x', 'down'|'down', 'x') too"):
        started(model, ["output"], ["mid"], x)
    extractor = started(model, ["output"], ["mid", "down", "x"], x)
    down, mid = values(model, "down", "mid", x=x)
    assert torch.equal(extractor(mid, down, x)["output"], model(x))


def test_it_starts_at_a_value_that_is_returned(resnet: nn.Module) -> None:
    (value,) = values(resnet, "layer2")
    assert started(resnet, ["layer2"], ["layer2"])(value)["layer2"] is value


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Split()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.split(x)
        return a * 2 + b


class Split(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.cos()


def test_a_module_that_returns_a_tuple() -> None:
    x = torch.rand(3)
    extractor = started(Pair(), ["output"], ["split"], x)
    assert torch.equal(extractor((x.exp(), x.cos()))["output"], Pair()(x))


class BySize(nn.Module):
    """Runs a layer for each eight columns of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 2, 2)
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[2] // 8
        x = self.stem(x)
        for layer in self.layers[:count]:
            x = layer(x)
        return x


def test_sizes_by_which_the_model_has_decided_are_checked() -> None:
    model, x = BySize(), torch.rand(2, 2, 16)
    extractor = started(model, ["output"], ["stem"], x)
    assert torch.equal(extractor(model.stem(x))["output"], model(x))
    assert torch.equal(extractor(model.stem(x[:1]))["output"], model(x[:1]))
    with pytest.raises(featx.SpecializationError, match="input 'stem' is fixed: the model has decided by sizes"):
        extractor(model.stem(torch.rand(2, 2, 32)))


def test_batches_by_which_the_model_has_decided_are_checked() -> None:
    class ByBatch(Skip):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self.mid if x.shape[0] > 2 else self.up
            return layer(self.down(x))

    model, x = ByBatch(), torch.rand(3, 4)
    extractor = started(model, ["output"], ["down"], x)
    assert torch.equal(extractor(model.down(x))["output"], model(x))
    with pytest.raises(featx.SpecializationError):
        extractor(model.down(x[:1]))


def test_values_by_which_the_model_decides_have_to_be_given() -> None:
    class ByValue(Skip):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self.mid if x.sum() > 0 else self.up
            return layer(self.down(x))

    with pytest.raises(featx.RequestError, match=r"inputs must have 'x' too: its values decide .*`x\.sum\(\) > 0`"):
        started(ByValue(), ["output"], ["down"], torch.rand(3, 4))


def test_a_dtype_by_which_the_model_decides_is_checked() -> None:
    class ByDtype(Skip):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self.mid if x.dtype == torch.float32 else self.up
            return layer(self.down(x))

    model, x = ByDtype(), torch.rand(3, 4)
    extractor = started(model, ["output"], ["down"], x)
    assert torch.equal(extractor(model.down(x))["output"], model(x))
    with pytest.raises(featx.SpecializationError, match="the dtype of input 'down'"):
        copy.deepcopy(extractor).double()(model.down(x).double())


def test_train_mode_draws_nothing_ahead_of_the_start() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    x = torch.rand(4, 5)
    extractor = started(Drops().train(), ["output"], ["one"], x)
    torch.manual_seed(0)
    found = extractor(x)["output"]
    torch.manual_seed(0)
    assert torch.equal(found, nn.functional.dropout(x, 0.5))


@pytest.mark.slow
def test_edits_and_features_behind_the_start(resnet: nn.Module) -> None:
    (value,) = values(resnet, "layer2")
    nodes = {"layer3": featx.Feature("pooled", pool="avg"), "output": "logits"}
    extractor = started(resnet, nodes, ["layer2"], edits={"layer4": featx.zero})
    found = extractor(value)
    assert torch.equal(found["pooled"], values(resnet, "layer3")[0].mean((2, 3)))
    assert torch.equal(found["logits"], resnet.fc.bias.expand(2, -1))  # type: ignore[union-attr]


def test_shape_of_a_value_between_an_edit_and_the_start_is_known(resnet: nn.Module) -> None:
    (value,) = values(resnet, "layer2")
    extractor = started(resnet, {"layer4": featx.Feature("C5", pool="avg")}, ["layer2"], edits={"layer3": featx.zero})
    assert extractor.channels == [512]
    expected = resnet.layer4(torch.zeros_like(resnet.layer3(value)))  # type: ignore[operator]
    assert torch.equal(extractor(value)["C5"], expected.mean((2, 3)))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "name": (["layer9"], featx.NodeNameError, "No node 'layer9'"),
    "empty": ([], featx.RequestError, "inputs is empty"),
    "pattern": (["layer?"], featx.RequestError, "inputs may not have patterns"),
    "number": ([3], featx.ArgumentTypeError, "inputs may have names"),
    "no name": ({"layer1": "a b", "layer2": "a_b"}, featx.RequestError, "is no name that Python takes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(resnet: nn.Module, name: str) -> None:
    inputs, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        started(resnet, ["output"], inputs)


def test_adaptive_extractors_start_at_the_beginning(resnet: nn.Module) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="adaptive=True traces the model again, from its own inputs"):
        started(resnet, ["output"], ["layer2"], adaptive=True)


@pytest.mark.sweep
@pytest.mark.parametrize("start", ["blocks.0", "blocks.1", "pos_drop"])
def test_a_vision_transformer(start: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3).eval()
    x = torch.rand(2, 3, 64, 64)
    extractor = started(model, ["output"], [start], x)
    assert torch.equal(extractor(values(model, start, x=x)[0])["output"], model(x))
    one = torch.rand(1, 3, 64, 64)
    assert torch.allclose(extractor(values(model, start, x=one)[0])["output"], model(one))


def test_a_keyword_is_no_name_of_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    with pytest.raises(featx.RequestError, match="'class', the name of the parameter for '0', is a keyword of Python"):
        featx.create_feature_extractor(model, ["1"], inputs={"0": "class"}, example_inputs=torch.rand(2, 3))


def test_paths_that_give_one_name_need_others() -> None:
    inner = nn.Sequential(nn.Linear(3, 3))
    model = nn.Sequential()
    model.add_module("a", inner)
    model.add_module("a_0", nn.Linear(3, 2))
    with pytest.raises(featx.RequestError, match="get one name of a parameter; give a dict with others"):
        featx.create_feature_extractor(model.eval(), ["output"], inputs=["a.0", "a_0"], example_inputs=torch.rand(2, 3))


def test_a_text_that_python_takes_for_no_name_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    with pytest.raises(featx.RequestError, match=r"'my input', the name of .* is no name .*, such as 'my_input'"):
        featx.create_feature_extractor(model, ["1"], inputs={"0": "my input"}, example_inputs=torch.rand(2, 3))


def test_the_inputs_from_which_a_missing_value_follows_are_named_too() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            weights = mask.float() * 2
            return self.last(self.first(x) * weights)

    example = (torch.rand(2, 4), torch.ones(2, 4))
    model = Masked().eval()
    with pytest.raises(featx.RequestError, match="inputs must have 'mul' too, or else 'mask', from which that follows"):
        featx.create_feature_extractor(model, ["last"], inputs=["first"], example_inputs=example)
    extractor = featx.create_feature_extractor(model, ["last"], inputs=["first", "mask"], example_inputs=example)
    assert torch.equal(extractor(model.first(example[0]), example[1])["last"], model(*example))


def test_a_requested_value_ahead_of_the_start_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    with pytest.raises(featx.RequestError, match=r"'0' is requested and does not follow from '1': it lies before that"):
        featx.create_feature_extractor(model, ["0"], inputs=["1"], example_inputs=torch.rand(2, 4))


def test_all_that_is_needed_is_named_at_once() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            if mask.all():
                h = h * 2
            return self.last(h + scale)

    inputs = (torch.rand(2, 4), torch.rand(2, 1), torch.ones(2, dtype=torch.bool))
    with pytest.raises(featx.RequestError, match=r"must have 'scale' too, and 'mask', whose values decide"):
        featx.create_feature_extractor(Masks().eval(), ["last"], inputs=["first"], example_inputs=inputs)


@pytest.mark.slow
def test_text_model_from_a_layer_on_needs_no_mask() -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    extractor = featx.create_feature_extractor(model, ["pooler"], inputs=["encoder.layer.1"])
    hidden = torch.rand(2, 7, 16)
    expected = model.pooler(model.encoder.layer[2](hidden))
    assert torch.equal(extractor(hidden)["pooler"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["encoder", "encoder.dropout_1"])
def test_decoder_of_t5_from_the_hidden_states_of_the_encoder_on(start: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=2, num_heads=2, use_cache=False
    )
    model = transformers.T5Model(config).eval()
    inputs = {
        "input_ids": torch.randint(1, 50, (2, 7)),
        "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
        "decoder_input_ids": torch.randint(1, 50, (2, 3)),
    }
    given = [start, "attention_mask", "decoder_input_ids"]
    extractor = featx.create_feature_extractor(model, ["decoder.final_layer_norm"], inputs=given, example_inputs=inputs)
    assert not [
        node for node in extractor.graph.find_nodes(op="call_module") if str(node.target).startswith("encoder.")
    ]
    hidden = torch.rand(2, 5, 16)
    mask, ids = torch.tensor([[1] * 5, [1] * 2 + [0] * 3]), torch.randint(1, 50, (2, 4))
    encoded = transformers.modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
    expected = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids).last_hidden_state
    found = extractor(encoded if start == "encoder" else hidden, mask, ids)
    assert torch.equal(found["decoder.final_layer_norm"], expected)


class WithHeadInTrainMode(nn.Module):
    """Returns what an auxiliary head gives too in train mode, as GoogLeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        result = self.second(x)
        return (result, self.head(x * 2)) if self.training else result


def test_a_start_that_does_not_do_in_the_other_mode_does_in_this_one() -> None:
    model, x = WithHeadInTrainMode().eval(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], inputs=["second"], example_inputs=x)
    assert torch.equal(extractor(model.second(x))["output"], model.second(x))
    with pytest.raises(featx.TraceError, match=r"no graph for train mode.*inputs must have 'head' too"):
        extractor.train()(x)
    with pytest.raises(featx.RequestError):
        featx.create_feature_extractor(model.train(), ["output"], inputs=["second"], example_inputs=x)


@dataclass
class Outputs:
    first: Any
    second: torch.Tensor


def test_parts_of_objects_are_named_that_have_no_name_themselves() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Outputs:
            return Outputs(Outputs(self.image(x), y), self.text(y))

    model, inputs = Net().eval(), (torch.rand(2, 4), torch.rand(2, 4))
    with pytest.raises(featx.RequestError, match=r"must have ('y', 'image'|'image', 'y') too"):
        featx.create_feature_extractor(model, ["output"], inputs=["text"], example_inputs=inputs)


def test_a_start_that_nothing_requested_follows_from_is_refused(resnet: Any) -> None:
    for inputs in (["layer2", "layer1"], ["layer1", "layer2"]):
        with pytest.raises(featx.RequestError, match=r"'layer1' is not used: .* follows from 'layer2' alone"):
            started(resnet, ["layer3"], inputs)
    both = started(resnet, ["layer3", "layer1.1"], ["layer2", "layer1.0"])
    first, second, third, last = values(resnet, "layer1.0", "layer2", "layer1.1", "layer3")
    assert torch.equal(both(second, first)["layer3"], last)
    assert torch.equal(both(second, first)["layer1.1"], third)


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.second(x) + self.mean
        self.mean.copy_(x.mean(0))
        return y


def test_a_start_that_only_a_later_call_reads_is_used() -> None:
    model, x, y = Averaging().eval(), torch.rand(3, 4), torch.rand(3, 4)
    extractor = started(model, ["output"], ["first", "second"], x)
    extractor(x, y)
    assert torch.allclose(extractor(x, y)["output"], y + x.mean(0))
