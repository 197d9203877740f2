"""Probabilities of fused attention: `....probabilities`, beside calls that never compute them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's documentation has it

import featx
from featx.features.requests.attention import attention_probabilities


def extractor_of(model: nn.Module, nodes: Any, example: Any, **options: Any) -> featx.DualGraphModule:
    extractor = featx.create_feature_extractor(
        model, nodes, example_inputs=example, suppress_diff_warning=True, **options
    )  # fmt: skip
    assert isinstance(extractor, featx.DualGraphModule)
    return extractor


MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [True, True, True, True]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask of booleans": {"attn_mask": MASK},
    "mask that is added": {"attn_mask": torch.randn(2, 1, 3, 4)},
    "scale": {"scale": 0.3},
    "dropout": {"dropout_p": 0.4},
    "all": {"attn_mask": MASK, "scale": 2.0, "dropout_p": 0.4},
}


class Attention(nn.Module):
    """Fused attention, and what it gives with an identity for values: its probabilities."""

    def __init__(self, options: dict[str, Any], groups: int = 1) -> None:
        super().__init__()
        self.options = options
        self.groups = groups
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8 // groups)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k = self.k(y).unflatten(-1, (4 // self.groups, 2)).transpose(1, 2)
        values = torch.eye(y.shape[1]).expand(*k.shape[:2], -1, -1)
        return F.scaled_dot_product_attention(q, k, values, **self.options, enable_gqa=self.groups > 1)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_what_the_values_are_weighed_with(name: str, groups: int) -> None:
    options = OPTIONS[name]
    model = nn.ModuleDict({"attn": Attention(options, groups)}).eval()
    inputs = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    expected = Attention({**options, "dropout_p": 0.0}, groups)
    expected.load_state_dict(model["attn"].state_dict())
    extractor = extractor_of(Wrapped(model["attn"]), ["attn.probabilities", "attn"], inputs)
    torch.manual_seed(0)
    found = extractor(*inputs)
    torch.manual_seed(0)
    assert torch.equal(found["attn"], model["attn"](*inputs))
    assert torch.allclose(found["attn.probabilities"], expected(*inputs), atol=1e-6)
    assert extractor.feature_info[0].shape == tuple(found["attn.probabilities"].shape) == (2, 4, 3, 4)


class Wrapped(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.attn(x, y)


def test_a_query_without_keys_has_none() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    found = attention_probabilities(torch.randn(1, 2, 4), torch.randn(1, 2, 4), mask)
    assert torch.equal(found[0, 1], torch.zeros(2))
    assert torch.allclose(found[0, 0].sum(), torch.tensor(1.0))


def test_they_are_computed_in_float32_and_returned_as_the_queries_are() -> None:
    q, k = torch.randn(1, 3, 4).half(), torch.randn(1, 3, 4).half()
    found = attention_probabilities(q, k)
    assert found.dtype == torch.float16
    assert torch.allclose(found.float(), (q.float() @ k.float().mT / 2).softmax(-1), atol=2e-3)


def test_only_they_are_computed_where_nothing_else_is_asked() -> None:
    model = Wrapped(Attention({}))
    extractor = extractor_of(model, ["attn.probabilities"], (torch.randn(2, 3, 8), torch.randn(2, 4, 8)))
    assert "scaled_dot_product_attention" not in extractor.code


def test_gradients_flow_through_them() -> None:
    model = Wrapped(Attention({}))
    x, y = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 4, 8)
    extractor = extractor_of(model, ["attn.probabilities"], (x, y))
    extractor(x, y)["attn.probabilities"][..., 0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_a_module_that_attends_twice() -> None:
    x = torch.randn(2, 3, 4)
    names = featx.get_graph_node_names(Twice(), example_inputs=x, attention_probabilities=True)[1]
    assert names == [
        "x", "scaled_dot_product_attention", "probabilities", "scaled_dot_product_attention_1", "probabilities_1"
    ]  # fmt: skip
    found = extractor_of(Twice(), ["probabilities", "probabilities_1"], x)(x)
    assert torch.allclose(found["probabilities"] @ x, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
    assert torch.equal(found["probabilities_1"].triu(1), torch.zeros(2, 3, 3))


class MultiheadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention(x, x, x)[0]
        y = self.attention(y, x, y)[0]
        return self.layer(self.layer(y))


def test_each_call_of_an_attention_of_torch_has_probabilities_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = MultiheadTwice().eval(), torch.randn(2, 3, 8)
    listed = featx.get_graph_node_names(model, example_inputs=x, attention_probabilities=True)[1]
    names = [name for name in listed if "probabilities" in name]
    paths = ("attention", "layer.self_attn")
    assert names == [f"{path}.probabilities{number}" for path in paths for number in ("", "_1")]
    found = extractor_of(model, names, x)(x)
    y, first = model.attention(x, x, x, average_attn_weights=False)
    y, second = model.attention(y, x, y, average_attn_weights=False)
    z = model.layer(y)
    others = [model.layer.self_attn(each, each, each, average_attn_weights=False)[1] for each in (y, z)]
    for name, expected in zip(names, (first, second, *others), strict=True):
        assert torch.allclose(found[name], expected, atol=1e-6), name
    rows = {row.name: row.shape for row in featx.nodes(model, x)}
    assert rows["attention.probabilities"] == rows["attention.probabilities_1"] == (2, 2, 3, 3)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_multihead_attention_of_torch(options: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, dropout=0.5, **options).eval()
    q, k = torch.randn(3, 3, 8), torch.randn(3, 3, options.get("kdim", 8))
    v = torch.randn(3, 3, options.get("vdim", 8))
    padding = torch.tensor([[False, False, True]] * 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, q: Any, k: Any, v: Any, padding: Any) -> Any:
            return self.attention(q, k, v, key_padding_mask=padding, need_weights=False)[0]

    model = Model().eval()
    extractor = extractor_of(model, ["attention.probabilities", "output"], (q, k, v, padding))
    found = extractor(q, k, v, padding)
    expected = attention(q, k, v, key_padding_mask=padding, average_attn_weights=False)[1]
    assert torch.equal(found["attention.probabilities"], expected)
    assert torch.equal(found["output"], model(q, k, v, padding))
    # In train mode the model draws what it would draw without them, and they are those before dropout.
    extractor.train()
    torch.manual_seed(1)
    found = extractor(q, k, v, padding)
    torch.manual_seed(1)
    assert torch.equal(found["output"], model.train()(q, k, v, padding))
    assert torch.equal(found["attention.probabilities"], expected)


@pytest.mark.slow
def test_the_encoder_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8)
    attention = model.layers[1].self_attn
    hidden = model.layers[0](x)
    expected = attention(hidden, hidden, hidden, average_attn_weights=False)[1]
    with torch.no_grad():  # the fast path of the layers computes no attention that can be seen
        found = extractor_of(model, ["layers.1.self_attn.probabilities"], x)(x)
    assert torch.allclose(found["layers.1.self_attn.probabilities"], expected, atol=1e-6)


class OwnMultihead(nn.MultiheadAttention):
    """As libraries have it that put their own layers into it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.multi_head_attention_forward(
            x, x, x, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0,
            self.out_proj.weight, self.out_proj.bias, training=self.training, need_weights=False,
        )[0]  # fmt: skip


def test_a_call_of_torchs_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OwnMultihead(8, 2)).eval()
    x = torch.randn(5, 2, 8)
    found = extractor_of(model, ["0.probabilities", "0"], x)(x)
    expected = nn.MultiheadAttention.forward(model[0], x, x, x, average_attn_weights=False)[1]  # type: ignore[arg-type]
    assert torch.equal(found["0.probabilities"], expected)
    assert torch.equal(found["0"], model(x))


def test_edits_ahead_of_it_are_seen() -> None:
    model = Wrapped(Attention({}))
    inputs = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    extractor = extractor_of(model, ["attn.probabilities"], inputs, edits={"attn.q": featx.zero})
    assert torch.allclose(extractor(*inputs)["attn.probabilities"], torch.full((2, 4, 3, 4), 0.25))


def test_a_module_of_that_name_is_itself() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probabilities = nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.probabilities(F.scaled_dot_product_attention(x, x, x))

    x = torch.randn(2, 3, 4)
    found = extractor_of(Named(), ["probabilities"], x)(x)
    assert torch.equal(found["probabilities"], Named()(x))


@pytest.mark.slow
def test_who_asks_for_a_softmax_is_told() -> None:
    model = Wrapped(Attention({}))
    example = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    with pytest.raises(featx.NodeNameError, match=r"fused there; ask for its probabilities by 'attn\.probabilities'"):
        extractor_of(model, ["attn.softmax"], example)
    with pytest.raises(featx.NodeNameError, match=r"fused there; ask for its probabilities by 'a\*\.probabilities'"):
        extractor_of(model, ["a*.attn_drop"], example)


@pytest.mark.slow
def test_who_edits_or_asks_for_probabilities_that_are_not_there_is_told() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.raises(featx.NodeNameError, match=r"can be requested and not edited.* fused_attn=False of timm"):
        featx.create_feature_extractor(
            Wrapped(Attention({})), ["output"], edits={"attn.probabilities": featx.zero},
            example_inputs=(x, torch.randn(2, 4, 8)),
        )  # fmt: skip
    with pytest.raises(featx.NodeNameError, match=r"does not fuse attention.* itself, by '\*\.softmax'"):
        extractor_of(nn.Sequential(Eager()), ["*.probabilities"], x)


class Eager(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_where_there_is_none_it_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(featx.NodeNameError, match=r"has no fused attention for all of '0\.probabilities'"):
        extractor_of(model, ["0.probabilities"], torch.randn(2, 4))


@pytest.mark.slow
def test_a_pattern_names_all_of_them() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Wrapped(Attention({})) for _ in range(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return [block(x, y) for block in self.blocks]

    inputs = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    model = Stack()
    found = extractor_of(model, {"blocks.*.attn.probabilities": "p*"}, inputs)(*inputs)
    assert list(found) == ["p0", "p1", "p2"]
    one = extractor_of(model, ["blocks.1.attn.probabilities"], inputs)(*inputs)
    assert torch.equal(found["p1"], one["blocks.1.attn.probabilities"])


@pytest.mark.sweep
def test_timms_attention_without_fusing() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    x = torch.rand(2, 3, 64, 64)
    found = extractor_of(model, ["blocks.1.attn.probabilities", "output"], x)(x)
    assert torch.equal(found["output"], model(x))
    for block in model.blocks:
        block.attn.fused_attn = False
    expected = extractor_of(model, ["blocks.1.attn.softmax"], x)(x)["blocks.1.attn.softmax"]
    assert torch.allclose(found["blocks.1.attn.probabilities"], expected, atol=1e-6)


TEXT: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16},
    "Llama": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 16,
    },
    "Qwen2": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 16,
    },
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("padded", [False, True])
def test_eager_attentions_of_transformers(name: str, padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config, kind = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}Model")
    options = {"vocab_size": 50, **TEXT[name]}
    model = kind._from_config(config(**options), attn_implementation="sdpa").eval()
    eager = kind._from_config(config(**options), attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    batch = {"input_ids": torch.randint(0, 50, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    if padded:
        batch["attention_mask"][1, 4:] = 0
    names = featx.get_graph_node_names(model, suppress_diff_warning=True, attention_probabilities=True)[1]
    wanted = [each for each in names if each.endswith("probabilities")]
    extractor = featx.create_feature_extractor(model, wanted, suppress_diff_warning=True)
    given = {} if name == "Bert" else {"use_cache": False}
    for inputs in (batch, {"input_ids": batch["input_ids"][:1, :3]}):
        found = list(extractor(**inputs, **given).values())
        expected = eager(**inputs, **given, output_attentions=True).attentions
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        rows = mask.bool()[:, None, :, None].expand_as(expected[0])  # of tokens that are no padding
        assert len(found) == len(expected) == 2
        assert all(torch.allclose(a[rows], b[rows], atol=1e-6) for a, b in zip(found, expected, strict=True))


class Grouped(nn.Module):
    """Asks the values for a size if no mask is given, as transformers does for grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k, self.v = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        q, k, v = (
            layer(x).view((*x.shape[:-1], -1, 2)).transpose(1, 2).contiguous() for layer in (self.q, self.k, self.v)
        )
        if attention_mask is None and k.shape[-1] == v.shape[-1] <= 256:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("starts_with_mask", [True, False])
def test_values_of_which_a_size_alone_is_asked_are_not_computed(starts_with_mask: bool) -> None:
    attention = Grouped().eval()
    ids, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    batches = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}]
    extractor = extractor_of(attention, ["probabilities"], batches[not starts_with_mask])
    assert "v.weight" not in extractor.state_dict()
    for batch in batches:
        q, k = (layer(attention.embed(ids)).view(2, 3, -1, 2).transpose(1, 2) for layer in (attention.q, attention.k))
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 2**0.5
        if "attention_mask" in batch:
            scores = scores.masked_fill(mask[:, None, None] == 0, float("-inf"))
        assert torch.allclose(extractor(**batch)["probabilities"], scores.softmax(-1), atol=1e-6)
    assert "v.weight" not in extractor.state_dict()


@pytest.mark.slow
def test_attentions_inside_of_a_module_of_torch_are_listed_and_matched() -> None:
    x = torch.rand(2, 7, 16)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    names = [f"layers.{number}.self_attn.probabilities" for number in range(2)]
    listed = featx.get_graph_node_names(model, example_inputs=x, attention_probabilities=True)[1]
    assert [name for name in listed if name.endswith("probabilities")] == names
    for pattern in ("layers.*.self_attn.probabilities", "**.probabilities"):
        found = featx.create_feature_extractor(model, [pattern], example_inputs=x)(x)
        expected = model.layers[0].self_attn(x, x, x, average_attn_weights=False)[1]
        assert list(found) == names
        assert torch.allclose(found[names[0]], expected, atol=1e-6)


@pytest.mark.slow
def test_the_probabilities_of_an_attention_that_is_the_model() -> None:
    x = torch.rand(2, 7, 16)
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    expected = model(x, x, x, average_attn_weights=False)[1]
    for name in ("probabilities", "**.probabilities"):
        found = featx.create_feature_extractor(model, [name], example_inputs=(x, x, x))(x, x.clone(), x.clone())
        assert torch.allclose(found["probabilities"], expected, atol=1e-6)


@pytest.mark.slow
def test_who_asks_a_model_that_does_not_fuse_learns_the_name() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1).eval()
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(featx.NodeNameError, match=r"they are 'blocks\.0\.attn\.softmax'"):
        featx.create_feature_extractor(model, ["blocks.0.attn.probabilities"])


def test_probabilities_in_a_symbolic_trace_are_refused_with_the_way_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    with pytest.raises(featx.RequestError, match=r"the probabilities of 'attention' .*; give example_inputs"):
        featx.create_feature_extractor(Model().eval(), ["attention.probabilities"], tracer="symbolic")


@pytest.mark.slow
@pytest.mark.parametrize("is_masked_first", [False, True])
def test_probabilities_alone_of_a_module_of_torch_for_batches_with_a_mask_and_without(is_masked_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = torch.rand(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    batches = [{"src": x, "src_key_padding_mask": mask}, {"src": x}]
    names = [f"layers.{number}.self_attn.probabilities" for number in range(2)]
    for asked in (names[:1], names):
        extractor = featx.create_feature_extractor(model, asked, example_inputs=batches[not is_masked_first])
        for batch in batches:
            found, padding = extractor(**batch), batch.get("src_key_padding_mask")
            before = x
            for name, part in zip(asked, model.layers, strict=False):
                expected = part.self_attn(before, before, before, key_padding_mask=padding, average_attn_weights=False)[
                    1
                ]
                torch.testing.assert_close(found[name], expected)
                before = part(before, src_key_padding_mask=padding)


@pytest.mark.slow
def test_probabilities_of_a_text_model_compile_in_one_graph() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=64)).eval()
    ids, mask = torch.randint(3, 60, (2, 9)), torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    inputs = {"input_ids": ids, "attention_mask": mask}
    name = "encoder.layer.0.attention.self.probabilities"
    extractor = featx.create_feature_extractor(model, [name], example_inputs=inputs).eval()
    with torch.no_grad():
        compiled = torch.compile(extractor, backend="eager", fullgraph=True)(**inputs)
        assert torch.equal(compiled[name], extractor(**inputs)[name])
