"""What a traced model returns has the form of what the model returns."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

import pytest
import torch
from agreement import agree, image, run, same
from torch import nn
from torch.nested import nested_tensor

import featx


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    loss: Any = None


@dataclass
class Detailed(Result):
    parts: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    size: int
    inner: Result


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, [x * 2]],
    "dict": lambda x: {"a": x + 1, "b": {"c": x * 2}},
    "dict by numbers": lambda x: {0: x + 1, (1, 2): x * 2},
    "ordered dict": lambda x: OrderedDict(b=x + 1, a=x * 2),
    "none": lambda x: (x + 1, None),
    "none alone": lambda x: None,
    "none inside": lambda x: {"a": None, "b": [x + 1, (None, x)]},
    "empty": lambda x: (x + 1, (), [], {}),
    "named": lambda x: Pair(x + 1, x * 2),
    "named inside": lambda x: {"pair": [Pair(x + 1, x * 2)]},
    "dataclass": lambda x: Result(x + 1),
    "dataclass of its own fields": lambda x: Detailed(x + 1, None, [x, x * 2]),
    "dataclass inside": lambda x: [Frozen(x.shape[0], Result(x + 1, {"a": Pair(x, x * 2)}))],
    "number": lambda x: (x + 1, x.shape[0], 3),
    "size": lambda x: (x.shape, x.shape[1], x.size(0) / 2),
    "text": lambda x: (x + 1, "text", True),
    "dtype and device": lambda x: (x.dtype, x.device),
    "input": lambda x: x,
    "twice the same": lambda x: (lambda y: (y, [y]))(x + 1),
    "view": lambda x: x.t(),
    "topk": lambda x: torch.topk(x, 2),
    "unpacked": lambda x: [*torch.topk(x, 2), *x.max(1)],
    "item": lambda x: (x + 1).sum().item(),
    "ragged": lambda x: [x[0, :1], [x[:, 1:], (x[0, 0],)], []],
    "by values": lambda x: (x[x > 0], x.nonzero()),
}
# The number of rows decides how many tensors there are.
OF_ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "ragged rows": lambda x: [row[: 1 + place] for place, row in enumerate(x)],
    "values of rows": lambda x: [row[row > 0] for row in x],
    "tolist": lambda x: x.tolist(),
}
NESTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "jagged": lambda x: nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
    "jagged inside": lambda x: {"a": (nested_tensor([x[0], x[1, 1:]], layout=torch.jagged), None)},
    "nested": lambda x: nested_tensor([x[0], x[1, :2]]),
}


class Returning(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OUTPUTS)
def test_output_has_the_form_of_the_models(kind: str) -> None:
    agree(Returning(OUTPUTS[kind]), (image(),), (image(2, seed=1),))
    traced = featx.trace(Returning(OUTPUTS[kind]), image())
    try:
        result = run(traced, image(5, 6))
    except featx.SpecializationError:
        assert kind in ("dataclass inside", "size", "number")
        return
    assert same(result, run(OUTPUTS[kind], image(5, 6)))


@pytest.mark.parametrize("kind", OF_ROWS)
def test_output_of_a_length_that_rows_decide_is_that_of_the_model_or_refused(kind: str) -> None:
    traced = agree(Returning(OF_ROWS[kind]), (image(),), (image(2, seed=1),))
    with pytest.raises(featx.SpecializationError):
        traced(image(5))


@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensor_that_the_model_itself_returns_is_the_models_or_refused(kind: str) -> None:
    for batch in (2, 5):
        with contextlib.suppress(featx.TraceError):
            traced = featx.trace(Returning(NESTED[kind]), image())
            assert same(traced(image(batch, seed=1)), NESTED[kind](image(batch, seed=1)))


class Around(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = Returning(compute)

    def forward(self, x: torch.Tensor) -> Any:
        return [self.inner(x * 2)]


@pytest.mark.parametrize("kind", [*OUTPUTS, *OF_ROWS, *NESTED])
def test_feature_of_a_module_has_the_form_of_what_the_module_returns(kind: str) -> None:
    compute = {**OUTPUTS, **OF_ROWS, **NESTED}[kind]
    extractor = featx.create_feature_extractor(Around(compute), ["inner"], example_inputs=image())
    for x in (image(), image(5)):
        assert same(extractor(x), {"inner": compute(x * 2)})


class Summing(nn.Module):
    def __init__(self, output: Callable[[torch.Tensor], Any], read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Returning(output)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.read(self.inner(x * 2)))


READS: dict[str, tuple[str, Callable[[Any], torch.Tensor]]] = {
    "dataclass": ("dataclass", lambda result: result.logits if result.loss is None else result.loss),
    "dict": ("dict", lambda result: result["a"] + result["b"]["c"]),
    "named": ("named", lambda result: result.first * result[1]),
    "none": ("none", lambda result: next(part for part in result if part is not None)),
    "jagged": ("jagged", lambda result: result.unbind()[1]),
}


@pytest.mark.parametrize("kind", READS)
def test_parts_of_what_a_whole_module_returns_are_followed(kind: str) -> None:
    name, read = READS[kind]
    model = Summing({**OUTPUTS, **NESTED}[name], read)
    extractor = featx.create_feature_extractor(model, ["inner", "tanh"], example_inputs=image())
    for x in (image(), image(2, seed=1)):
        assert same(extractor(x), {"inner": model.inner(x * 2), "tanh": model(x)})


def test_output_of_transformers_is_built_by_the_graph_and_can_be_a_feature() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def compute(x: torch.Tensor) -> Any:
        return outputs.BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x, x * 2))

    agree(Returning(compute), (image(),), (image(5, 6),))
    agree(Returning(lambda x: compute(x).to_tuple()), (image(),), (image(5, 6),))
    agree(Returning(lambda x: compute(x)[0] + compute(x)["hidden_states"][1]), (image(),), (image(5, 6),))
    extractor = featx.create_feature_extractor(Around(compute), ["inner"], example_inputs=image())
    assert same(extractor(image(5))["inner"], compute(image(5) * 2))


def test_fields_of_an_output_that_are_set_later_come_last() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def compute(x: torch.Tensor) -> Any:
        result = outputs.BaseModelOutputWithPooling(last_hidden_state=x + 1, hidden_states=(x, x * 2))
        result.pooler_output = x.mean(1)  # a field before `hidden_states`
        return result

    x = image()
    expected, extractor = compute(x), featx.create_feature_extractor(Returning(compute), ["output"], example_inputs=x)
    found = extractor(x)["output"]
    assert list(found) == list(expected) == ["last_hidden_state", "hidden_states", "pooler_output"]
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found.pooler_output, x.mean(1))
    assert type(found) is type(expected)


class Output(OrderedDict[str, Any]):
    """A dict whose items are attributes too, as the outputs of diffusers are."""

    def __post_init__(self) -> None:
        for each in fields(cast(Any, self)):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)


@dataclass
class Sample(Output):
    sample: torch.Tensor
    variance: torch.Tensor | None


@pytest.mark.parametrize("has_variance", [False, True])
def test_dict_that_is_a_dataclass_with_required_fields(has_variance: bool) -> None:
    class Denoising(nn.Module):
        def forward(self, x: torch.Tensor) -> Sample:
            return Sample(x * 2, x.var() if has_variance else None)

    result = featx.trace(Denoising(), image())(image())
    assert type(result) is Sample
    assert same(result.sample, image() * 2)
    assert list(result) == (["sample", "variance"] if has_variance else ["sample"])
