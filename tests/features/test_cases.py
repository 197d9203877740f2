"""Extractors of models that go by the values of inputs, or by which are given: padding, masks."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import featx

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]])
PADDED = (IDS != 0).long()
FULL = torch.ones_like(IDS)
BATCHES: dict[str, dict[str, torch.Tensor]] = {
    "no mask": {"input_ids": IDS},
    "full mask": {"input_ids": IDS, "attention_mask": FULL},
    "padded": {"input_ids": IDS, "attention_mask": PADDED},
    "padded on the left": {"input_ids": IDS.flip(1), "attention_mask": PADDED.flip(1)},
    "shorter": {"input_ids": IDS[:, :4], "attention_mask": PADDED[:, :4]},
    "one": {"input_ids": IDS[:1], "attention_mask": PADDED[:1]},
    "more and longer": {"input_ids": IDS.repeat(2, 3), "attention_mask": PADDED.repeat(2, 3)},
}


class ByPadding(nn.Module):
    """Goes another way where there is padding, as masking in transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.mix, self.head = (
            nn.Embedding(20, 4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)
        )  # fmt: skip
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.embed(input_ids)) * self.scale
        if attention_mask is not None and not attention_mask.all():
            x = x * attention_mask[..., None]
        return self.head(self.mix(x).mean(1))


def seen_by_hook(model: nn.Module, path: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    seen: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[-1] if isinstance(seen[-1], torch.Tensor) else seen[-1][0]


def extractor_of(model: nn.Module, **options: Any) -> featx.DualGraphModule:
    options.setdefault("example_inputs", BATCHES["no mask"])
    extractor = featx.create_feature_extractor(model, ["mix.0", "head"], suppress_diff_warning=True, **options)
    assert isinstance(extractor, featx.DualGraphModule)
    return extractor


def test_a_module_that_a_feature_applies_is_there_in_each_case() -> None:
    model, probe = ByPadding().eval(), nn.Linear(4, 3)
    request = {"mix.0": featx.Feature("probed", apply=probe)}
    extractor = featx.create_feature_extractor(model, request, example_inputs=BATCHES["no mask"])
    for inputs in BATCHES.values():
        assert torch.equal(extractor(**inputs)["probed"], probe(seen_by_hook(model, "mix.0", inputs)))


@pytest.mark.parametrize("example", BATCHES)
def test_every_batch_has_the_features_that_a_hook_sees(example: str) -> None:
    model = ByPadding().eval()
    extractor = extractor_of(model, example_inputs=BATCHES[example])
    for inputs in BATCHES.values():
        for path in ("mix.0", "head"):
            assert torch.equal(extractor(**inputs)[path], seen_by_hook(model, path, inputs))


class PassesOn(nn.Module):
    """Gives its inputs to another model, as the models of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByPadding()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("example", BATCHES)
def test_every_batch_of_a_model_that_passes_its_inputs_on(example: str) -> None:
    model = PassesOn().eval()
    extractor = featx.create_feature_extractor(
        model, ["model.mix.0", "model.head"], example_inputs=BATCHES[example], suppress_diff_warning=True
    )
    for inputs in BATCHES.values():
        for path in ("model.mix.0", "model.head"):
            assert torch.equal(extractor(**inputs)[path], seen_by_hook(model, path, inputs))


@pytest.mark.sweep
@pytest.mark.parametrize("example", [None, "no mask", "full mask", "padded"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "gpt2", "llama", "t5"])
def test_text_models_of_transformers(name: str, example: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 20}
    size.update(intermediate_size=16, max_position_embeddings=40)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 0)
    makers: dict[str, Any] = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**size)),
        "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**size)),
        "distilbert": lambda: transformers.DistilBertModel(
            transformers.DistilBertConfig(dim=16, n_heads=2, n_layers=2, hidden_dim=16, vocab_size=20)
        ),
        "modernbert": lambda: transformers.ModernBertModel(transformers.ModernBertConfig(**size, **special)),
        "gpt2": lambda: transformers.GPT2Model(
            transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
        ),
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**size)),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(d_model=16, d_kv=8, num_heads=2, num_layers=2, d_ff=16, vocab_size=20)
        ),
    }
    torch.manual_seed(0)
    model = makers[name]().eval()
    path = next(path for path, _ in model.named_modules() if path.endswith((".1", "block.1")))
    options = {} if example is None else {"example_inputs": transformers.BatchEncoding(dict(BATCHES[example]))}
    extractor = featx.create_feature_extractor(model, [path], suppress_diff_warning=True, **options)
    for inputs in BATCHES.values():
        with torch.no_grad():
            found = extractor(**inputs)[path]
        found = found if isinstance(found, torch.Tensor) else found[0]
        assert torch.equal(found, seen_by_hook(model, path, inputs))


@pytest.mark.slow
def test_a_batch_may_be_passed_whole() -> None:
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 20}
    model = transformers.BertModel(transformers.BertConfig(intermediate_size=16, **size)).eval()
    extractor = featx.create_feature_extractor(model, ["encoder.layer.0"])
    batch = transformers.BatchEncoding(dict(BATCHES["no mask"]))
    assert torch.equal(extractor(batch)["encoder.layer.0"], extractor(**batch)["encoder.layer.0"])
    traced = featx.trace(model, batch)
    assert torch.equal(traced(**batch).last_hidden_state, model(**batch).last_hidden_state)


def test_without_it_the_same_batch_raises() -> None:
    extractor = extractor_of(ByPadding().eval(), adaptive=False)
    with pytest.raises(featx.SpecializationError, match=r"'attention_mask' is given now.*adaptive=True"):
        extractor(**BATCHES["padded"])


def test_each_kind_of_input_is_traced_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    extractor = extractor_of(ByPadding().eval())
    with caplog.at_level(logging.INFO, "featx"):
        for _ in range(2):
            for inputs in BATCHES.values():
                extractor(**inputs)
    again = [record.getMessage() for record in caplog.records if "tracing again" in record.getMessage()]
    assert len(again) == 2  # a full mask, and one with padding
    assert "'attention_mask' is given now" in again[0]


@pytest.mark.slow
def test_the_model_may_be_gone_and_the_extractor_may_be_copied() -> None:
    model = ByPadding().eval()
    expected = seen_by_hook(model, "head", BATCHES["padded"])
    extractor = extractor_of(model)
    used = copy.deepcopy(extractor)
    used(**BATCHES["padded"])
    copies = [copy.deepcopy(used), copy.copy(used), pickle.loads(pickle.dumps(used)), extractor]
    del model
    gc.collect()
    for each in copies:
        assert torch.equal(each(**BATCHES["padded"])["head"], expected)


def test_it_follows_casts_and_devices_with_the_model() -> None:
    model = ByPadding().eval()
    reference = copy.deepcopy(model).double()
    extractor = extractor_of(model).double()
    for inputs in BATCHES.values():
        assert torch.equal(extractor(**inputs)["head"], seen_by_hook(reference, "head", inputs))
    assert {each.dtype for each in (*model.parameters(), *model.buffers())} == {torch.float64}
    assert extractor.scale is model.scale


@pytest.mark.parametrize("names", [("no mask", "padded"), ("padded", "no mask")])
def test_draws_of_a_graph_that_does_not_hold_are_taken_back(names: tuple[str, str]) -> None:
    model = ByPadding().train()
    extractor = extractor_of(model, example_inputs=BATCHES[names[0]])
    for name in (*names, *names):
        torch.manual_seed(0)
        expected = seen_by_hook(model, "head", BATCHES[name])
        after = torch.rand(3)
        torch.manual_seed(0)
        assert torch.equal(extractor(**BATCHES[name])["head"], expected)
        assert torch.equal(torch.rand(3), after)


def test_gradients_are_those_of_the_model() -> None:
    model = ByPadding().eval()
    extractor = extractor_of(model)
    for name in ("padded", "no mask"):
        model.zero_grad()
        model(**BATCHES[name]).sum().backward()
        expected = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        extractor(**BATCHES[name])["head"].sum().backward()
        found = [each.grad for each in model.parameters() if each.grad is not None]
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_a_graph_that_somebody_has_edited_gets_no_others() -> None:
    extractor = extractor_of(ByPadding().eval())
    graph = extractor.graph
    head = next(node for node in graph.nodes if node.target == "head")
    with graph.inserting_after(head):
        twice = graph.call_function(torch.mul, (head, 2))
    head.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    for each in (extractor, copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        with pytest.raises(featx.SpecializationError):
            each(**BATCHES["padded"])


class Deeper(ByPadding):
    """Has a layer and a dropout that run for inputs with a mask alone."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.head(self.mix(x if attention_mask is None else self.more(x)).mean(1))


def test_parts_that_only_other_inputs_need_are_taken_from_the_model() -> None:
    model = Deeper().eval()
    extractor = extractor_of(model)
    copied = pickle.loads(pickle.dumps(extractor))
    for batch in ("padded", "no mask", "more and longer"):
        for each in (extractor, copied):
            assert torch.equal(each(**BATCHES[batch])["head"], seen_by_hook(model, "head", BATCHES[batch]))
    assert extractor.state_dict()["more.0.weight"] is not None
    assert extractor.more[0].weight is model.more[0].weight


@pytest.mark.parametrize("training", [True, False])
def test_such_parts_are_in_the_mode_of_the_extractor(training: bool) -> None:
    model = Deeper().train(not training)
    extractor = extractor_of(model).train(training)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = extractor(**BATCHES["padded"])["head"]
        torch.manual_seed(0)
        expected = model.train(training)(**BATCHES["padded"])
    assert torch.equal(found, expected)


class Frozen(Deeper):
    """Keeps its dropout in eval mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.more[1].eval()
        return self


def test_such_parts_are_in_the_mode_in_which_the_model_keeps_them() -> None:
    model = Frozen().eval()
    extractor = extractor_of(model).train()
    assert torch.equal(extractor(**BATCHES["padded"])["head"], seen_by_hook(model.train(), "head", BATCHES["padded"]))


def test_an_extractor_with_a_loaded_state_dict_takes_no_weights_that_were_not_in_it() -> None:
    model = Deeper().eval()
    extractor = extractor_of(model)
    extractor.load_state_dict(extractor_of(Deeper().eval()).state_dict())
    for each in (extractor, copy.deepcopy(extractor)):
        with pytest.raises(featx.SpecializationError, match=r"uses parts that this extractor does not have: more"):
            each(**BATCHES["padded"])
    adaptive = featx.create_feature_extractor(model, ["head"], example_inputs=BATCHES["no mask"], adaptive=True)
    found = adaptive(**BATCHES["padded"])["head"]
    assert torch.equal(found, seen_by_hook(model, "head", BATCHES["padded"]))


def test_tracing_again_for_seconds_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = extractor_of(ByPadding().eval())
    monkeypatch.setattr("featx.features.building.cases._LONG", 0.0)
    with pytest.warns(
        featx.SlowTraceWarning, match=r"^ByPadding was traced again .* took \d+\.\d s: input 'attention_mask'"
    ):
        extractor(**BATCHES["padded"])
    extractor(**BATCHES["padded"])  # without a warning, which would be an error


def test_parts_without_tensors_in_the_state_dict_are_taken_from_the_model() -> None:
    class Scaled(ByPadding):
        def __init__(self) -> None:
            super().__init__()
            self.same, self.gate = nn.Identity(), nn.Sequential(nn.Sigmoid())
            self.factor = torch.tensor(3.0)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.same(self.embed(input_ids))
            if attention_mask is not None:
                x = self.gate(x * self.factor)
            return self.head(self.mix(x).mean(1))

    model = Scaled().eval()
    extractor = extractor_of(model)
    saved = set(extractor.state_dict())
    for batch in ("padded", "no mask", "more and longer"):
        with torch.no_grad():
            found = extractor(**BATCHES[batch])
        for name in ("mix.0", "head"):
            assert torch.equal(found[name], seen_by_hook(model, name, BATCHES[batch]))
    assert set(extractor.state_dict()) == saved


@pytest.mark.slow
def test_parts_in_train_mode_and_parts_in_eval_mode() -> None:
    model = ByPadding().eval()
    model.drop.train()
    extractor = extractor_of(model)
    copied = copy.deepcopy(extractor)
    batches = ("no mask", "padded", "more and longer", "full mask")
    for batch in batches:
        torch.manual_seed(0)
        expected = model(**BATCHES[batch])
        for each in (extractor, copied):
            torch.manual_seed(0)
            assert torch.equal(each(**BATCHES[batch])["head"], expected)
    extractor.eval()
    for batch in batches:
        assert torch.equal(extractor(**BATCHES[batch])["head"], model.eval()(**BATCHES[batch]))


def test_parts_that_have_changed_their_mode_since() -> None:
    model = ByPadding().eval()
    model.drop.train()
    extractor = extractor_of(model)
    model.mix.train()
    for each in (extractor, copy.deepcopy(extractor)):
        with pytest.raises(featx.SpecializationError, match="parts in train mode and others in eval mode"):
            each(**BATCHES["padded"])


@pytest.mark.slow
def test_inputs_that_always_differ_are_refused_in_the_end() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(int(x.sum())):
                x = x + 1
            return self.last(x)

    extractor = featx.create_feature_extractor(Counts().eval(), ["last"], example_inputs=torch.ones(1))
    for number in range(1, 18):
        assert extractor(torch.tensor([float(number)]))["last"] == 2 * number
    with pytest.raises(featx.SpecializationError, match="makes no more"):
        extractor(torch.tensor([18.0]))


def test_the_models_own_error_comes_through() -> None:
    extractor = extractor_of(ByPadding().eval())
    with pytest.raises(RuntimeError, match="size of tensor a"):
        extractor(IDS, PADDED[:, :4])


@pytest.mark.slow
def test_image_models_do_not_keep_the_parts_that_no_feature_needs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    last = weakref.ref(model[2])
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=torch.rand(1, 3, 4, 4))
    del model
    gc.collect()
    assert last() is None
    assert extractor(torch.rand(1, 3, 4, 4))["1"].shape == (1, 4, 4, 4)


def test_the_signature_and_torchscript_are_those_of_the_first_graph() -> None:
    extractor = extractor_of(ByPadding().eval())
    assert list(inspect.signature(extractor.forward).parameters) == ["input_ids", "attention_mask"]
    with pytest.warns((FutureWarning, DeprecationWarning)):
        scripted = torch.jit.script(extractor)
    assert torch.equal(scripted(IDS)["head"], extractor(IDS)["head"])


def test_a_tensor_that_the_model_has_replaced_since_is_no_part_of_a_further_graph() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = list(x.chunk(2, 1))
            return torch.cat([parts[0], self.inner(parts[-1])], 1)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shape, self.anchors, self.last = None, torch.empty(0), nn.Conv2d(4, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.shape != x.shape:
                self.anchors = torch.arange(x.shape[2])[:, None] * 100 + torch.arange(x.shape[3])
                self.shape = x.shape
            return self.last(x).flatten(1) + self.anchors.flatten()

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Split(), Head()).eval()
    tall, wide = torch.rand(1, 3, 12, 8), torch.rand(1, 3, 8, 12)
    with torch.no_grad():
        model(tall)
        extractor = featx.create_feature_extractor(model, ["1.inner", "2.last", "output"], example_inputs=tall)
        assert torch.equal(extractor(tall)["output"], model(tall))
        model(wide)
        with pytest.raises(featx.SpecializationError, match=r"has replaced '2.anchors' since this extractor was made"):
            extractor(wide)


class Images(nn.Module):
    """Puts image features in the place of tokens, as vision-language models do, of which there must be as many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        if int((ids == 1).sum()) != len(images):
            raise ValueError("images and their tokens do not match")
        for index, token in enumerate(ids[0].tolist()):
            if token == 2:
                hidden = hidden * (index + 1)
        return self.last(hidden.masked_scatter((ids == 1)[..., None], images))


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [None, True])
def test_what_an_earlier_input_has_shown_of_sizes_is_not_tried_again(
    adaptive: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    def run(ids: list[int]) -> int:
        caplog.clear()
        inputs = torch.tensor([ids]), torch.rand(ids.count(1), 4)
        assert torch.equal(extractor(*inputs)["last"], model(*inputs))
        return sum("other sizes" in record.getMessage() for record in caplog.records)

    model = Images().eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        example = torch.tensor([[3, 1, 1, 2, 4]]), torch.rand(2, 4)
        extractor = featx.create_feature_extractor(model, {"last": "last"}, example_inputs=example, adaptive=adaptive)
        at_first = sum("other sizes" in record.getMessage() for record in caplog.records)
        assert run([3, 1, 1, 5, 4]) <= at_first // 2
        assert run([1, 1, 1, 2, 4, 5, 6]) <= at_first // 2


class ByDevice(nn.Module):
    """Does something else on another kind of device, as `batched_nms` of torchvision does."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device
        if self.asks == "is_cpu":
            is_on_cpu = x.is_cpu
        elif self.asks == "type":
            is_on_cpu = x.device.type == "cpu"
        else:
            is_on_cpu = self.is_cpu(device) if self.asks == "passed on" else str(device) == "cpu"
        return self.fc(x) if is_on_cpu else self.fc(x)[:1]

    def is_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu"


@pytest.mark.parametrize("asks", ["is_cpu", "type", "passed on", "text"])
def test_a_model_that_asks_for_the_kind_of_a_device_is_traced_anew_where_it_was_moved(asks: str) -> None:
    model, x = ByDevice(asks).eval(), torch.rand(3, 4)
    extractor = featx.create_feature_extractor(model, ["fc", "output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))
    extractor.to("meta")
    found = extractor(x.to("meta"))
    assert (found["fc"].shape, found["output"].shape) == ((3, 2), (1, 2))
    with pytest.raises(featx.SpecializationError, match=r"device|is_cpu"):
        featx.trace(ByDevice(asks).eval(), x).to("meta")(x.to("meta"))


class OfSeveral(nn.Module):
    """Its first input may stay on the CPU, as lengths do; the others are in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, lengths: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        device = batch["x"].device
        y = self.fc(batch["x"])
        return y if device.type == "cpu" else y[:1]


def test_each_input_counts() -> None:
    lengths, x = torch.tensor([3]), torch.rand(3, 4)
    extractor = featx.create_feature_extractor(OfSeveral().eval(), ["output"], example_inputs=(lengths, {"x": x}))
    extractor.to("meta")
    assert extractor(lengths, {"x": x.to("meta")})["output"].shape == (1, 2)


class ByKeywords(nn.Module):
    """Takes options and tensors by `**kwargs`, and goes by the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        x = self.mix(x)
        return (-x if x.sum() > 0 else x) * options["mask"]


@pytest.mark.parametrize("names", [("mask", "tag"), ("tag", "mask")])
def test_inputs_by_keywords_keep_their_order(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x = ByKeywords().eval(), torch.ones(2, 3)
    options = {name: {"mask": torch.tensor([1.0, 0.0, 2.0]), "tag": "hi"}[name] for name in names}
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"x": x, **options})
    signs = {bool(model.mix(each).sum() > 0) for each in (x, -5 * x)}
    assert signs == {True, False}
    for each in (x, -5 * x):
        assert torch.equal(extractor(x=each, **options)["output"], model(each, **options))


class _CountsOtherOperations(nn.Module):
    """Without a mask there is one product less, so that `mul_1` is another one; `add` is the same in both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        y = self.layer(x) * 2
        for factor in (3, 5):
            y = y * factor
        return y + 1


OPTIONS = pytest.mark.parametrize("options", [{}, {"adaptive": True}], ids=["cases", "adaptive"])


@OPTIONS
@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("is_edit", [True, False])
def test_a_name_means_the_same_operation_for_other_inputs(
    options: dict[str, Any], has_mask: bool, is_edit: bool
) -> None:
    model, x = _CountsOtherOperations().eval(), torch.rand(2, 3, 4)
    both = [{"x": x, "attention_mask": torch.ones(2, 3)}, {"x": x}]
    names = ["mul_1", "mul_2", "mul_3"] if has_mask else ["mul", "mul_1", "mul_2"]
    values = [model.layer(x) * 2, model.layer(x) * 2 * 3, model.layer(x) * 2 * 3 * 5]
    edits = {names[1]: lambda value: value * 7} if is_edit else None
    extractor = featx.create_feature_extractor(
        model, ["add", "layer"] if is_edit else names, example_inputs=both[not has_mask], edits=edits, **options
    )
    for inputs in (*both, *reversed(both)):
        found = extractor(**inputs)
        if is_edit:
            assert torch.equal(found["add"], values[1] * 7 * 5 + 1)
        else:
            assert all(torch.equal(found[name], value) for name, value in zip(names, values, strict=True))


@OPTIONS
def test_an_operation_that_runs_for_some_inputs_only_is_refused_for_others(options: dict[str, Any]) -> None:
    model, x = _CountsOtherOperations().eval(), torch.rand(2, 3, 4)
    with_mask = {"x": x, "attention_mask": torch.ones(2, 3)}
    for nodes, edits in ((["mul"], None), (["output"], {"mul": lambda value: value * 5})):
        extractor = featx.create_feature_extractor(model, nodes, example_inputs=with_mask, edits=edits, **options)
        extractor(**with_mask)
        with pytest.raises(featx.SpecializationError, match="'mul' was computed for an earlier input"):
            extractor(x=x)


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if attention_mask is None:
            return x * 2 + 1
        return x * attention_mask[..., None] + 1


@OPTIONS
def test_branches_with_as_many_operations_have_the_same_names(options: dict[str, Any]) -> None:
    model, x = _Branches().eval(), torch.rand(2, 3, 4)
    with_mask = {"x": x, "attention_mask": torch.rand(2, 3)}
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=with_mask, **options)
    assert torch.equal(extractor(**with_mask)["mul"], x * with_mask["attention_mask"][..., None])
    assert torch.equal(extractor(x=x)["mul"], x * 2)
