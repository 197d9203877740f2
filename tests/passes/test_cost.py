"""cost: FLOPs against torch's own counter and against layers worked out by hand; bytes and memory by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import featx


def counted_by_torch(model: Callable[..., Any], *args: Any) -> int:
    # With gradients, because torch counts nothing in the fast path of attention.
    with FlopCounterMode(display=False) as counter:
        model(*args)
    return counter.get_total_flops()


def cost_of(function: Callable[..., Any], *args: Any, **options: Any) -> featx.passes.CostReport:
    """Return the cost of a function, of a Sequential, or of any other module as one node."""
    if not isinstance(function, nn.Module) or isinstance(function, nn.Sequential):
        return featx.cost(featx.symbolic_trace(function), *args, **options)
    graph = featx.Graph()
    inputs = tuple(graph.placeholder(f"input_{index}") for index in range(len(args)))
    graph.output(graph.call_module("layer", inputs))
    return featx.cost(featx.GraphModule({"layer": function}, graph), *args, **options)


# -- real models -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("resnet50", 64, 25_557_032),
        ("mobilenet_v3_small", 64, 2_542_856),
        ("vit_b_16", 224, 86_567_656),
        ("swin_t", 64, 28_288_354),
    ],
)
def test_torchvision_s_models(name: str, size: int, parameters: int) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.get_model(name, weights=None).eval()
    value = torch.rand(2, 3, size, size)
    report = featx.cost(featx.symbolic_trace(model), value)
    assert report.total.flops == counted_by_torch(model.to("meta"), value.to("meta"))
    assert report.total.parameters == parameters  # as torchvision's documentation has it
    assert report.unknown == {}


@pytest.mark.slow
def test_timm_s_convnext_traced_on_an_example_and_extracted() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("convnext_atto").eval()
    value = torch.rand(1, 3, 64, 64)
    flops = counted_by_torch(model, value)
    traced = featx.trace(model, value)
    assert featx.cost(traced, value).total.flops == flops
    extractor = featx.create_feature_extractor(model, ["stages.3", "head.fc"])
    report = featx.cost(extractor, value)
    assert report.total.flops == flops
    whole = {node.name for node in report.nodes if node.op == "call_module"}
    assert {"stages_0", "stages_1"} <= whole
    short = featx.create_feature_extractor(model, ["stages.1"])
    expected = counted_by_torch(lambda x: model.stages[1](model.stages[0](model.stem(x))), value)
    assert featx.cost(short, value).total.flops == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 100, (2, 12))
    report = featx.cost(featx.trace(model, ids), ids)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of CPUs is not counted by each version of torch
        assert report.total.flops == counted_by_torch(model, ids)
    # By hand: a layer has four projections, two products of attention and two layers of feed-forward.
    layer = 2 * 24 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 2 * 2 * 12 * 12 * 32
    assert report.total.flops == 2 * layer + 2 * 2 * 32 * 32  # and the pooler
    assert sum(module.flops for module in report.modules if module.path.count(".") == 2) == 2 * layer


def test_equal_calls_take_equal_memory() -> None:
    class Products(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y + x @ y * (x @ y)

    report = featx.cost(featx.symbolic_trace(Products()), torch.rand(2, 3, 4, 5), torch.rand(2, 3, 5, 6))
    products = [node for node in report.nodes if node.name.startswith("matmul")]
    assert [node.allocated for node in products] == [2 * 3 * 4 * 6 * 4] * 3
    assert report.total.peak == 4 * (2 * 3 * 4 * 6 * 4)  # three products, and that of two of them


# -- layers by hand ----------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], int, int]] = {
    # The module, the shape of its input, FLOPs and parameters by hand.
    "linear": (nn.Linear(6, 10), (4, 6), 2 * 4 * 6 * 10, 70),
    "linear on a sequence": (nn.Linear(6, 10, bias=False), (2, 3, 6), 2 * 6 * 6 * 10, 60),
    "conv": (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 5, 5), 2 * (2 * 8 * 25) * 27, 224),
    "conv with stride": (nn.Conv2d(3, 8, 3, stride=2), (1, 3, 9, 9), 2 * (8 * 16) * 27, 224),
    "conv with dilation": (nn.Conv2d(3, 8, 3, dilation=2), (1, 3, 9, 9), 2 * (8 * 25) * 27, 224),
    "conv with groups": (nn.Conv2d(4, 8, 3, groups=4), (1, 4, 5, 5), 2 * (8 * 9) * 9, 80),
    "conv of one dimension": (nn.Conv1d(3, 5, 4), (2, 3, 10), 2 * (2 * 5 * 7) * 12, 65),
    "conv of three dimensions": (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 2 * (3 * 27) * 16, 51),
    # Each input goes through a filter of 8 * 3 * 3.
    "transposed conv": (nn.ConvTranspose2d(3, 8, 3, stride=2), (1, 3, 4, 4), 2 * (3 * 16) * 72, 224),
    "transposed conv with groups": (nn.ConvTranspose2d(4, 8, 3, groups=2), (1, 4, 4, 4), 2 * (4 * 16) * 36, 152),
    "embedding": (nn.Embedding(20, 8), (3, 5), 0, 160),
    "batch norm": (nn.BatchNorm2d(4), (2, 4, 5, 5), 0, 8),
    "layer norm": (nn.LayerNorm(8), (3, 8), 0, 16),
    # Five steps with a batch of 2: 4 gates from 6 inputs and from 7 values of state.
    "lstm": (nn.LSTM(6, 7), (5, 2, 6), 2 * 5 * 2 * 4 * 7 * (6 + 7), 4 * 7 * (6 + 7 + 2)),
    "lstm of two layers, both ways": (
        nn.LSTM(6, 7, 2, bidirectional=True), (5, 2, 6), 2 * 5 * 2 * 4 * 7 * 2 * (6 + 7 + 14 + 7),
        2 * 4 * 7 * (6 + 7 + 2 + 14 + 7 + 2),
    ),
    "gru": (nn.GRU(6, 7), (5, 2, 6), 2 * 5 * 2 * 3 * 7 * (6 + 7), 3 * 7 * (6 + 7 + 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [False, True])
def test_layer_by_hand(name: str, training: bool) -> None:
    module, shape, flops, parameters = LAYERS[name]
    module = copy.deepcopy(module).train(training)
    value = torch.randint(0, 20, shape) if name == "embedding" else torch.rand(shape)
    total = cost_of(module, value).total
    assert (total.flops, total.parameters) == (flops, parameters)
    assert total.parameter_bytes == 4 * parameters


def test_bilinear_layer_by_hand() -> None:
    # For each of 2 rows, 5 sums of 3 * 4 products of three.
    assert cost_of(nn.Bilinear(3, 4, 5), torch.rand(2, 3), torch.rand(2, 4)).total.flops == 3 * 2 * 5 * 12


a, b = torch.rand(4, 5), torch.rand(5, 6)
batch = torch.rand(3, 4, 5)
heads = torch.rand(2, 3, 7, 8)


@pytest.mark.parametrize(
    ("function", "args", "flops"),
    [
        (lambda x, y: torch.matmul(x, y), (a, b), 2 * 4 * 5 * 6),
        (lambda x, y: x @ y, (batch, b), 2 * 3 * 4 * 5 * 6),
        (lambda x, y: torch.bmm(x, y), (batch, batch.transpose(1, 2)), 2 * 3 * 4 * 4 * 5),
        (lambda x, y: torch.einsum("bij,jk->bik", x, y), (batch, b), 2 * 3 * 4 * 5 * 6),
        (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (batch, batch), 2 * 3 * 4 * 4 * 5),
        (lambda x, y: torch.addmm(x.new_zeros(6), x, y), (a, b), 2 * 4 * 5 * 6),
        (lambda x: x[0] @ x[0], (a,), 2 * 5),
        (lambda x, y: x @ y[:, 0], (a, b), 2 * 4 * 5),
        # Scores of 7 * 7 over width 8, and 7 * 7 weights of values of width 8, for 2 * 3 heads.
        (lambda x: F.scaled_dot_product_attention(x, x, x), (heads,), 2 * 6 * 7 * 7 * (8 + 8)),
        (lambda x: F.scaled_dot_product_attention(x, x[:, :, :5], x[:, :, :5, :4]), (heads,), 2 * 6 * 7 * 5 * (8 + 4)),
        (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (heads,), 2 * 6 * 7 * 7 * 16),
        (lambda x: torch.fft.fft(x.to(torch.complex64)), (torch.rand(3, 16),), 5 * 3 * 16 * 4),
        (lambda x: torch.fft.rfft(x), (torch.rand(3, 16),), 5 * 3 * 16 * 4 // 2),
    ],
)
def test_function_by_hand(function: Callable[..., Any], args: tuple[Any, ...], flops: int) -> None:
    assert cost_of(function, *args).total.flops == flops


@pytest.mark.parametrize("gradients", [False, True])
def test_multi_head_attention_whole_with_and_without_the_fast_path(gradients: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    value = torch.rand(3, 5, 8)
    report = cost_of(model, value, value, value, gradients=gradients)
    assert report.total.flops == 2 * 15 * 4 * 8 * 8 + 2 * 2 * 3 * 5 * 5 * 8
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    report = cost_of(layer, value, gradients=gradients)
    assert report.total.flops == 2 * 15 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 2 * 3 * 5 * 5 * 8
    assert ("aten::_transformer_encoder_layer_fwd" in report.nodes[-1].operators) is not gradients


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (lambda x: x + 1, 40),
        (lambda x: x.relu_(), 40),
        (lambda x: x.sum(1), 40),
        (lambda x: F.max_pool2d(x[None], 2), 2 * 4 * 4),  # 2 channels, 2 * 2 results of 4 values each
        (lambda x: x.reshape(2, -1).contiguous(), 0),
        (lambda x: x.transpose(1, 2).contiguous(), 0),
        (lambda x: torch.cat([x, x]), 0),
        (lambda x: x.softmax(-1), 5 * 40),
        (lambda x: F.layer_norm(x, (5,)), 5 * 40),
        (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), 2 * 40),
    ],
)
def test_elementwise_operations_by_hand(function: Callable[..., Any], operations: int) -> None:
    total = cost_of(function, torch.rand(2, 4, 5)).total
    assert (total.flops, total.elementwise) == (0, operations)


# -- bytes and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "read", "written"),
    [
        (lambda x: x * 2, 400, 400),
        (lambda x: x * x, 400, 400),  # one tensor is read once
        (lambda x: x * x[0], 440, 400),
        (lambda x: x + x[:1].expand(10, 10), 440, 400),  # an expanded dimension lies in one place
        (lambda x: x.view(-1).unsqueeze(0).t()[3:], 0, 0),
        (lambda x: x.add_(1), 400, 400),
        (lambda x: x.fill_(1), 0, 400),
        (lambda x: x[:5].copy_(x[5:]), 200, 200),
        (lambda x: x.double(), 400, 800),
        (lambda x: x > 0, 400, 100),
        (lambda x: x.sum(), 400, 4),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: torch.zeros_like(x), 0, 400),  # no value is looked at
        (lambda x: torch.add(x, 1, out=torch.empty(10, 10)), 400, 400),
        (lambda x: torch.cat([x, x[:2]]), 480, 480),
    ],
)
def test_bytes_by_hand(function: Callable[..., Any], read: int, written: int) -> None:
    total = cost_of(function, torch.rand(10, 10)).total
    assert (total.bytes_read, total.bytes_written, total.bytes_moved) == (read, written, read + written)


def test_bytes_of_layers_by_hand() -> None:
    linear = cost_of(nn.Linear(6, 10), torch.rand(4, 6)).total
    assert (linear.bytes_read, linear.bytes_written) == (4 * (24 + 70), 4 * 40)
    assert linear.intensity == pytest.approx(480 / (4 * 134))
    norm = cost_of(nn.BatchNorm2d(4).eval(), torch.rand(2, 4, 5, 5)).total
    assert (norm.bytes_read, norm.bytes_written) == (4 * (200 + 4 * 4), 4 * 200)
    # 15 rows of 8 are read, and as many indices of 8 bytes.
    embedding = cost_of(nn.Embedding(2000, 8), torch.randint(0, 20, (3, 5))).total
    assert (embedding.bytes_read, embedding.bytes_written) == (4 * 120 + 8 * 15, 4 * 120)


def test_attention_does_not_write_its_scores() -> None:
    q = torch.rand(1, 2, 100, 8)
    total = cost_of(lambda x: F.scaled_dot_product_attention(x, x * 1, x * 1), q).total
    scores = 4 * 2 * 100 * 100
    assert total.bytes_written < scores
    assert total.peak < scores


def test_memory_of_values_that_live_and_die() -> None:
    def function(x: torch.Tensor):
        a = x + 1  # 400 bytes
        b = a * 2  # 800: a and b
        c = b.view(-1)[:10] + 1  # a is gone, 440
        return c, torch.cat([b, b])  # b, c and 800 more: 1240

    report = cost_of(function, torch.rand(10, 10))
    assert [node.peak for node in report.nodes] == [400, 800, 400, 400, 440, 1240]
    assert report.total.peak == 1240
    assert report.total.allocated == 400 + 400 + 40 + 800
    assert (report.weight_bytes, report.input_bytes, report.kept_bytes) == (0, 400, 840)


def test_memory_inside_a_module_that_is_kept_whole_is_seen() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor):
            big = torch.cat([x] * 10)
            return big.sum(0)

    class Whole(featx.Tracer):
        def is_leaf_module(self, m: Any, module_qualified_name: Any):
            return True

    model = nn.Sequential(Inner(), nn.Linear(10, 3))
    report = featx.cost(featx.GraphModule(model, Whole().trace(model)), torch.rand(10, 10))
    assert report.nodes[0].operators == {"aten::cat": 1, "aten::sum": 1}
    assert report.nodes[0].peak == 4000 + 40
    assert report.weight_bytes == 4 * 33


def test_gradients_keep_what_the_backward_pass_needs() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Sigmoid(), nn.Linear(10, 10), nn.Sigmoid())
    without, with_gradients = (cost_of(model, torch.rand(4, 10), gradients=flag) for flag in (False, True))
    assert (without.total.peak, without.kept_bytes) == (2 * 160, 160)
    # Both sigmoids keep their results. The second layer reads one of these.
    assert with_gradients.kept_bytes == 2 * 160
    assert with_gradients.total.flops == without.total.flops


# -- sums --------------------------------------------------------------------------------------------------------------


def test_modules_are_sums_of_their_nodes_and_shared_weights_count_once() -> None:
    class Block(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor):
            return self.linear(x) + x

    shared = nn.Linear(4, 4)
    model = nn.Sequential(Block(nn.Linear(4, 4)), nn.Sequential(Block(shared), Block(shared)))
    report = cost_of(model, torch.rand(3, 4))
    rows = {module.path: (module.kind, module.flops, module.parameters, module.nodes) for module in report.modules}
    # A module is known by the first of its paths.
    assert rows == {
        "": ("Sequential", 3 * 96, 40, 6),
        "0": ("Block", 96, 20, 2),
        "0.linear": ("Linear", 96, 20, 1),
        "1": ("Sequential", 2 * 96, 20, 4),
        "1.0": ("Block", 96, 20, 2),
        "1.0.linear": ("Linear", 2 * 96, 20, 2),
        "1.1": ("Block", 96, 20, 2),
    }
    assert report.total.flops == sum(node.flops for node in report.nodes)
    assert report.total.elementwise == 3 * 12


def test_tables() -> None:
    report = cost_of(nn.Sequential(nn.Linear(1000, 1000), nn.ReLU()), torch.rand(8, 1000))
    assert str(report).splitlines() == [
        "module      class       params   FLOPs  elem-wise     read  written  FLOP/B    alive",
        "----------  ----------  ------  ------  ---------  -------  -------  ------  -------",
        "Sequential  Sequential  1.00 M  16.0 M     8.00 k  4.07 MB  64.0 kB    3.87  64.0 kB",
        "  0         Linear      1.00 M  16.0 M          0  4.04 MB  32.0 kB    3.93  32.0 kB",
        "  1         ReLU             0       0     8.00 k  32.0 kB  32.0 kB   0.125  64.0 kB",
        "",
        "1.00 M parameters, 16.0 MFLOPs, 8.00 k element-wise operations, 4.13 MB moved",
        "memory: 4.10 MB (weights 4.00 MB, inputs 32.0 kB, other values at most 64.0 kB)",
    ]
    assert report.node_table().splitlines()[2].split()[:4] == ["0", "0", "(8,", "1000)"]
    assert len(report.module_table(depth=0).splitlines()) == 3


# -- the model stays as it was, and what cannot be counted -------------------------------------------------------------


def test_model_and_inputs_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()).train()
    state, value = copy.deepcopy(model.state_dict()), torch.rand(2, 3, 8, 8)
    generator = torch.get_rng_state()
    cost_of(model, value)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert model[0].weight.grad is None


def test_input_on_the_meta_device_stands_for_one_beside_buffers_and_constants() -> None:
    norm, value = nn.BatchNorm1d(4, affine=False).eval(), torch.empty(2, 4, device="meta")
    assert cost_of(norm, value).total.elementwise == 2 * (2 * 4)  # each minus the mean, times a factor
    assert cost_of(lambda x: x @ torch.ones(4, 3), value).total.flops == 2 * (2 * 4 * 3)


def test_inputs_and_models_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    expected = cost_of(model, torch.rand(2, 3, 8, 8))
    value = torch.empty(2, 3, 8, 8, device="meta")
    assert cost_of(model, value).total == expected.total
    assert cost_of(model.to("meta"), value).total.flops == expected.total.flops


@pytest.mark.slow
def test_graph_that_asks_for_a_value_runs_for_real_and_puts_back_what_it_writes() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor):
            self.calls += 1
            return self.linear(x) if (x * 2).sum().item() > 0 else x

    model = Asks()
    traced = featx.trace(model, torch.ones(3, 4))
    assert featx.cost(traced, torch.ones(3, 4)).total.flops == 2 * 3 * 4 * 4
    assert model.calls == 0
    with pytest.raises(featx.SpecializationError):
        featx.cost(traced, -torch.ones(3, 4))


@pytest.fixture
def operator() -> Any:
    with torch.library._scoped_library("featx_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", torch.empty_like, "Meta")
        yield torch.ops.featx_test.twice


def test_unknown_operator_raises_with_the_node_and_its_line(operator: Any) -> None:
    def function(x: torch.Tensor):
        return operator(x @ x)

    traced = featx.trace(function, torch.rand(3, 3))
    text = str(traced.graph)
    with pytest.raises(featx.CostError, match=r"featx_test\.twice, which node 'twice' at .*test_cost\.py:\d+") as e:
        featx.cost(traced, torch.rand(3, 3))
    assert "rules={torch.ops.featx_test.twice: function}" in str(e.value)
    assert str(traced.graph) == text
    report = featx.cost(traced, torch.rand(3, 3), unknown="list")
    assert report.unknown == {"featx_test::twice": ("twice",)}
    assert report.total.flops == 2 * 27
    assert (report.nodes[-1].bytes_read, report.nodes[-1].bytes_written) == (36, 36)
    assert "not counted: featx_test.twice in twice" in str(report)


def test_own_rules_go_first(operator: Any) -> None:
    traced = featx.symbolic_trace(lambda x: operator(x) + 1)
    rules = {operator: lambda x, result: 7 * result.numel(), torch.ops.aten.add.Tensor: lambda *args, result: 1}
    total = featx.cost(traced, torch.rand(3, 3), rules=rules).total
    assert (total.flops, total.elementwise) == (64, 0)


def test_error_in_a_rule_is_told_and_the_model_does_not_run(operator: Any) -> None:
    seen: list[bool] = []

    def rule(x: torch.Tensor, result: torch.Tensor) -> int:
        seen.append(type(x) is torch.Tensor)
        raise KeyError("no such shape")

    traced = featx.symbolic_trace(lambda x: operator(x))
    with pytest.raises(featx.CostError, match=r"featx_test::twice raises KeyError\('no such shape'\)") as e:
        featx.cost(traced, torch.rand(3), rules={operator: rule})
    assert isinstance(e.value.__cause__, KeyError)
    assert seen == [False]


def test_errors() -> None:
    traced = featx.symbolic_trace(nn.Linear(3, 4))
    with pytest.raises(featx.ArgumentTypeError, match="'raise' or 'list'"):
        featx.cost(traced, torch.rand(2, 3), unknown="ignore")
    with pytest.raises(featx.ArgumentTypeError, match="no featx graph"):
        featx.cost(torch.fx.symbolic_trace(nn.Linear(3, 4)), torch.rand(2, 3))
    with pytest.raises(featx.InputError, match="takes the inputs"):
        featx.cost(traced)
    with pytest.raises(RuntimeError):
        featx.cost(traced, torch.rand(2, 5))


def test_small_figures_stand_apart_from_their_units() -> None:
    report = str(cost_of(nn.Linear(3, 3, bias=False), torch.rand(1, 3)))
    assert "\n9 parameters, 18 FLOPs, 0 element-wise operations, " in report


def test_inference_mode_counts_the_same() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @torch.inference_mode()
        def forward(self, x: torch.Tensor):
            return F.scaled_dot_product_attention(*[self.linear(x)[None, None]] * 3)

    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()).eval()
    value = torch.rand(2, 3, 8)
    expected = cost_of(model, value).total
    inside = cost_of(Inside(), torch.rand(5, 4))
    with torch.inference_mode():
        assert cost_of(model, value).total == expected
        assert cost_of(model, torch.rand(2, 3, 8)).total == expected
    assert inside.total.flops == 2 * 5 * 4 * 4 + 2 * 5 * 5 * 8
    assert "aten::addmm" in inside.nodes[0].operators


def test_cost_of_a_module_is_found_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 2)))
    report = featx.cost(model, torch.rand(3, 4))
    assert report["1.0"].flops == 2 * 3 * 8 * 2
    with pytest.raises(featx.NodeNameError, match=r"no module '1\.1' has run"):
        report["1.1"]
