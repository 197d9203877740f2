"""nodes: the table of all values inside a model."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import featx


@pytest.fixture(scope="module")
def table() -> featx.NodeTable:
    return featx.nodes(torchvision.models.resnet18(weights=None), torch.rand(2, 3, 64, 96))


@pytest.mark.slow
def test_it_has_the_names_that_can_be_asked_for(table: featx.NodeTable) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    _, names = featx.get_graph_node_names(model)
    assert set(names) <= set(table.names)
    containers = {"layer1", "layer1.0", "layer2.0.downsample"}
    assert containers <= set(table.names)
    modules = dict(model.named_modules())
    assert set(table.names) - set(names) <= set(modules)


def test_each_row_says_what_a_hook_sees(table: featx.NodeTable) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    paths = {module: path for path, module in model.named_modules() if path}
    seen: dict[str, tuple[int, ...]] = {}
    for module, path in paths.items():
        module.register_forward_hook(lambda _, args, output, path=path: seen.update({path: tuple(output.shape)}))
    model(torch.rand(2, 3, 64, 96))
    # Some modules are called twice; the row of their path tells of the last call, as a request does.
    assert {path: table[path].shape for path in seen} == seen
    assert {path: table[path].type for path in seen} == {path: type(module).__name__ for module, path in paths.items()}
    assert all(table[path].kind == "module" for path in seen)


def test_costs_are_those_of_torchs_counter(table: featx.NodeTable) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(2, 3, 64, 96))
    counts = counter.get_flop_counts()
    for path in ("conv1", "layer1", "layer2.0", "fc"):
        assert table[path].flops == sum(counts[f"ResNet.{path}"].values())
        assert table[path].parameters == sum(each.numel() for each in model.get_submodule(path).parameters())
    assert table["relu"].flops == 0


class Branches(nn.Module):
    """Calls the layers in lists of lists, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = nn.ModuleList(
            [nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)]), nn.ModuleList([nn.Linear(3, 7)])]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layers in self.lists:
            for layer in layers:  # type: ignore[attr-defined]
                x = layer(x)
        return x


def test_a_list_has_the_flops_of_what_is_inside() -> None:
    table = featx.nodes(Branches(), torch.rand(2, 3))
    by_hand = {"lists.0": 2 * 2 * (15 + 15), "lists.1": 2 * 2 * 21, "lists": 2 * 2 * 51}
    assert {name: table[name].flops for name in by_hand} == by_hand
    assert [table[name].flops for name in ("lists.0.0", "lists.0.1", "lists.1.0")] == [60, 60, 84]


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.layer(h if (ids == 3).any() else h * 2)


def test_decisions_about_values_do_not_keep_it_from_counting() -> None:
    table = featx.nodes(AsksForValues(), torch.tensor([[1, 3, 5]]))
    assert table["layer"].flops == 2 * 3 * 4 * 4


def test_it_says_where_a_value_comes_from(table: featx.NodeTable) -> None:
    file, _, line = str(table["layer1.0.add"].source).rpartition(":")
    with open(file) as lines:
        assert lines.read().splitlines()[int(line) - 1].strip() == "out += identity"


def test_rows_of_classes_that_derive_from_one(table: featx.NodeTable) -> None:
    norms = table.filter(type=nn.modules.batchnorm._BatchNorm)
    assert norms.names == table.filter(type=nn.BatchNorm2d).names != []
    assert table.filter(type=nn.Module).names == table.filter(kind="module").names


def test_rows_are_filtered(table: featx.NodeTable) -> None:
    assert table.filter("layer?").names == ["layer1", "layer2", "layer3", "layer4"]
    assert table.filter(stride=32, kind="module", depth=1).names == ["layer4"]
    assert table.filter("layer1.**", type="Conv2d").names == table.filter("layer1.**", type=nn.Conv2d).names
    assert len(table.filter("layer1.**", type="Conv2d")) == 4
    assert len(table.filter(type="BatchNorm*")) == 20
    assert set(table.filter(shape=(None, 512, 1, 1)).names) == {"avgpool"}
    assert table.filter(layout="NC").names == ["flatten", "fc"]
    assert set(table.filter(kind="operation").filter(stride=4).names) == {"layer1.0.add", "layer1.1.add"}
    assert table.filter(kind=("input", "operation")).names[0] == "x"


@pytest.mark.slow
def test_rows_are_filtered_by_a_stride_for_each_axis() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1), nn.ReLU()).eval()
    found = featx.nodes(conv, torch.rand(1, 3, 32, 32))
    assert found.filter(stride=(2, 1)).names == found.filter(stride=[2, 1]).names == ["0", "1"]
    assert not found.filter(stride=(1, 2))
    with pytest.raises(featx.ArgumentTypeError, match="stride must be a number, or one for each axis, got 'x'"):
        found.filter(stride=(2, "x"))  # type: ignore[arg-type]


def test_its_names_are_what_an_extractor_takes(table: featx.NodeTable) -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.rand(2, 3, 64, 96)
    names = table.filter(depth=1, kind="module").names
    found = featx.create_feature_extractor(model, names)(x)
    assert [tuple(found[name].shape) for name in names] == [table[name].shape for name in names]


def test_it_is_a_sequence(table: featx.NodeTable) -> None:
    assert table[0].name == "x"
    assert [row.name for row in table[1:3]] == ["conv1", "bn1"]
    assert len(list(table)) == len(table)
    assert table[0] in table
    assert "layer1.0.add" in table
    assert "layer9" not in table
    with pytest.raises(featx.NodeNameError, match=r"no node 'layer9'\. Did you mean 'layer"):
        table["layer9"]


def test_several_patterns_select_rows(table: featx.NodeTable) -> None:
    assert table.filter(["fc", "layer[12]"]).names == ["layer1", "layer2", "fc"]
    assert str(table.filter("nothing.*")) == "no node of ResNet is in this table"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": 5}, "kind may be access, input, module, operation, weight, got 5"),
        ({"kind": "layer"}, "kind may be access, input, module, operation, weight"),
        ({"match": nn.ReLU}, r"for a class, filter\(type=ReLU\)"),
        ({"stride": "8"}, "stride must be a number, or one for each axis, got '8'"),
        ({"layout": 4}, "layout must be a text such as 'NCHW', got 4"),
        ({"match": nn.ReLU()}, r"match must be a pattern such as 'layer1.\*' or a list of them, got ReLU"),
        ({"type": nn.ReLU()}, "type must be a class of modules, its name or a pattern of it, got ReLU"),
        ({"shape": 64}, r"shape must be lengths, such as \(None, 64, None, None\), got 64"),
        ({"shape": "2x64"}, "shape must be lengths.*got '2x64'"),
    ],
)
def test_a_filter_of_the_wrong_kind_is_refused(table: featx.NodeTable, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=message):
        table.filter(**wrong)


def test_it_prints_modules_down_to_a_depth(table: featx.NodeTable) -> None:
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "type", "shape", "layout", "stride", "params", "FLOPs", "mode"]
    (row,) = (line for line in lines if line.startswith("layer2 "))
    assert row.split()[:5] == ["layer2", "Sequential", "2x128x8x12", "NCHW", "8"]
    assert not any("getitem" in line or line.startswith("layer1.0.conv1") for line in lines[:-1])
    assert any(line.startswith("layer1.0.conv1 ") for line in table.to_text(depth=3).splitlines())
    assert len(table.to_text(everything=True).splitlines()) == len(table) + 2
    assert repr(table) == str(table)


def test_it_folds_in_a_notebook(table: featx.NodeTable) -> None:
    html = table._repr_html_()
    assert html.count("<details") == len([row for row in table if row.type in ("Sequential", "BasicBlock")])
    assert html.index("layer1  ") < html.index("layer1.0  ") < html.index("layer1.0.conv1  ")


def test_rich_prints_it(table: featx.NodeTable) -> None:
    console = pytest.importorskip("rich.console")
    printer = console.Console(width=200, record=True, file=io.StringIO())
    printer.print(table)
    assert "layer4.1" in printer.export_text()


def test_it_becomes_json(table: featx.NodeTable) -> None:
    rows = json.loads(json.dumps(table.to_dicts()))
    assert rows[1]["name"] == "conv1"
    assert rows[1]["shape"] == [2, 64, 32, 48]
    assert rows[1]["dtype"] == "float32"


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x = self.extra(x) if self.training else x.exp()
        return x.relu()


def test_it_says_in_which_mode_a_value_exists() -> None:
    table = featx.nodes(Dropped(), torch.rand(2, 4))
    assert {row.name: row.mode for row in table} == {
        "x": "both", "fc": "both", "extra": "train", "exp": "eval", "relu": "both"
    }  # fmt: skip


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        featx.nodes(Fails(), torch.rand(2))


@pytest.mark.slow
def test_the_model_is_only_read() -> None:
    model = torchvision.models.resnet18(weights=None)
    before: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    featx.nodes(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_probabilities_of_fused_attention_are_rows() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=0).eval()
    images = torch.rand(2, 3, 224, 224)
    table = featx.nodes(model, images)
    rows = table.filter(type="probabilities")
    assert rows.names == ["blocks.0.attn.probabilities", "blocks.1.attn.probabilities"]
    found = featx.create_feature_extractor(model, rows.names, example_inputs=images)(images)
    assert [row.shape for row in rows] == [tuple(value.shape) for value in found.values()]
    names = table.names
    assert names[names.index(rows[0].name) - 1] == "blocks.0.attn.scaled_dot_product_attention"


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("shape", [(3, 5, 8), (5, 8)])
def test_probabilities_of_torchs_module_have_their_shape(options: dict[str, bool], shape: tuple[int, ...]) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, average_attn_weights=False)[1]

    model, x = Attends().eval(), torch.rand(shape)
    assert featx.nodes(model, x)["attention.probabilities"].shape == tuple(model(x).shape)


@pytest.mark.slow
def test_heads_and_tokens_are_no_places_of_an_image() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0).eval()
    table = featx.nodes(model, torch.rand(2, 3, 224, 224))
    inside = table.filter("blocks.0.attn.*", shape=(None, None, None, None))
    assert len(inside) > 5
    assert {row.layout for row in inside} == {None}
    assert {row.stride for row in inside} == {None}


def test_maps_of_an_uneven_size_are_maps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 7), nn.ReLU(), nn.AdaptiveAvgPool2d(7)).eval()
    table = featx.nodes(model, torch.rand(2, 3, 64, 96))
    assert [table[name].layout for name in ("0", "1", "2")] == ["NCHW"] * 3


@pytest.mark.slow
def test_layers_inside_modules_that_torchvision_takes_for_one_node_are_in_it() -> None:
    model = torchvision.models.mobilenet_v2(weights=None).eval()
    found = featx.nodes(model, flops=False).filter(type=nn.Conv2d)
    assert [row.name for row in found] == [name for name, each in model.named_modules() if isinstance(each, nn.Conv2d)]
    name = found[1].name
    extractor = featx.create_feature_extractor(model, [name], suppress_diff_warning=True)
    assert extractor(torch.rand(1, 3, 64, 64))[name].shape[2:] == (32, 32)


def test_hint_names_a_module_of_the_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    text = featx.nodes(model, torch.rand(1, 4)).to_text(depth=1)
    assert ".filter('0.*')" in text
    assert "layer1" not in text
