"""Models whose forward reads what their own hooks store: it is that of this call, and not of an earlier one."""

from __future__ import annotations

import functools
import inspect
import queue
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx

GLOBAL: dict[str, Tensor] = {}


class Reading(nn.Module):
    def __init__(self, connect: Callable[[Any], Callable[[], Tensor]]) -> None:
        super().__init__()
        self.block, self.read = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out: Any = None
        self.stored = connect(self)

    def forward(self, x: Tensor) -> Tensor:
        self.block(x)
        return self.read(self.stored())

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.out = out


def in_a_dict(model: Any) -> Callable[[], Tensor]:
    kept: dict[str, Tensor] = {}
    model.block.register_forward_hook(lambda module, args, out: kept.update(a=out))
    return lambda: kept["a"]


def in_a_global(model: Any) -> Callable[[], Tensor]:
    model.block.register_forward_hook(lambda module, args, out: GLOBAL.update(a=out))
    return lambda: GLOBAL["a"]


def on_the_parent(model: Any) -> Callable[[], Tensor]:
    model.block.register_forward_hook(model.keep)
    return lambda: model.out


def on_the_module(model: Any) -> Callable[[], Tensor]:
    model.block.register_forward_hook(lambda module, args, out: setattr(module, "out", out))
    return lambda: model.block.out


def in_a_list_of_a_partial(model: Any) -> Callable[[], Tensor]:
    kept: list[Tensor] = []

    def keep(where: list[Tensor], module: nn.Module, args: Any, out: Tensor) -> None:
        where[:] = [out]

    model.block.register_forward_hook(partial(keep, kept))
    return lambda: kept[0]


def by_a_pre_hook(model: Any) -> Callable[[], Tensor]:
    kept: dict[str, Tensor] = {}
    model.block.register_forward_pre_hook(lambda module, args: kept.update(a=args[0] * 2))
    return lambda: kept["a"]


STORES = (in_a_dict, in_a_global, on_the_parent, on_the_module, in_a_list_of_a_partial, by_a_pre_hook)


@pytest.mark.slow
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_what_hooks_store_is_no_constant(store: Callable[[Any], Callable[[], Tensor]], has_run: bool) -> None:
    GLOBAL.clear()
    model = Reading(store).eval()
    if has_run:
        model(torch.zeros(2, 4))
    if store is on_the_parent and not has_run:
        model.out = torch.zeros(2, 4)
    extractor = featx.create_feature_extractor(model, ["read", "output"], example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


def test_constant_of_a_model_with_hooks_elsewhere_is_fine() -> None:
    table = torch.arange(4.0)
    seen: list[int] = []

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)
            self.block.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) + table

    model, x = Adding().eval(), torch.rand(3, 4)
    extractor = featx.create_feature_extractor(model, ["block", "add"], example_inputs=torch.rand(2, 4))
    assert seen == []
    assert torch.equal(extractor(x)["add"], model(x))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_run_in_their_order_whatever_was_registered_first(register: str) -> None:
    def doubled(_: nn.Module, *values: Any) -> Any:
        value = values[-1]
        return (value[0] * 2,) if isinstance(value, tuple) else value * 2

    def raised(_: nn.Module, *values: Any) -> Any:
        value = values[-1]
        return (value[0] + 1,) if isinstance(value, tuple) else value + 1

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    getattr(model[0], register)(doubled)
    getattr(model[0], register)(raised, prepend=True)
    x = torch.randn(2, 4)
    assert torch.equal(featx.trace(model, x)(x), model(x))
    found = featx.create_feature_extractor(model, {"0.1": "a", "1": "b"}, example_inputs=x)(x)
    assert torch.equal(found["b"], model(x))


def test_an_ordered_dict_keeps_the_order_that_it_was_given_later() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = OrderedDict(a=2.0, b=3.0, c=5.0)
            self.scales.move_to_end("a")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for scale in self.scales.values():
                x = x * scale + 1
            return x

    x = torch.randn(2, 4)
    assert torch.equal(featx.trace(Ordered(), x)(x), Ordered()(x))


def test_what_hooks_collect_in_a_list_of_a_closure_is_followed() -> None:
    kept: list[torch.Tensor] = []
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: kept.append(output))

    class Stacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.clear()
            self.layers(x)
            return torch.stack(kept)

    model = Stacks().eval()
    extractor = featx.create_feature_extractor(model, ["layers.0", "output"], example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


class PerceptualFeatures(nn.Module):
    """What hooks of layers store is returned by a method, as in perceptual losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.features: dict[int, torch.Tensor] = {}
        for place in (0, 2):
            self.net[place].register_forward_hook(partial(self.store, place))

    def store(self, place: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.features[place] = output

    def stored(self) -> list[torch.Tensor]:
        return [self.features[place] for place in sorted(self.features)]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.features.clear()
        self.net(x)
        return self.stored()


class PerceptualLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extract = PerceptualFeatures()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for one, other in zip(self.extract(x), self.extract(y), strict=True):  # Python 3.12 compiles a list to a `try`
            total = total + (one - other).abs().mean()
        return total


@pytest.mark.parametrize("has_source", [True, False])
@pytest.mark.parametrize("name", ["output", "extract.net.2"])
def test_what_hooks_inside_of_a_module_store_is_in_what_it_returns(name: str, has_source: bool) -> None:
    """Without source it is not known what the hooks change, and they run all the same."""
    kinds: dict[str, Any] = {**globals()}
    if not has_source:
        exec("\n".join(inspect.getsource(kind) for kind in (PerceptualFeatures, PerceptualLoss)), kinds)
    model = kinds["PerceptualLoss"]().eval()
    example = (torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8))
    extractor = featx.create_feature_extractor(model, list({name, "output"}), example_inputs=example)
    for pair in (example, (torch.rand(1, 3, 9, 9), torch.rand(1, 3, 9, 9))):
        assert model(*pair) > 0
        assert torch.equal(extractor(*pair)["output"], model(*pair))


def test_path_of_a_layer_means_its_first_call_also_where_its_hooks_are_read() -> None:
    model = PerceptualLoss().eval()
    x, y = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)
    names = ["extract.net.0", "extract.net.1", "extract.net.2", "output"]
    found = featx.create_feature_extractor(model, names, example_inputs=(x, y))(x, y)
    for count, name in enumerate(names[:-1], 1):
        assert torch.equal(found[name], model.extract.net[:count](x))
    assert torch.equal(found["output"], model(x, y))


VARIABLE: ContextVar[Any] = ContextVar("VARIABLE")


class Stores(nn.Module):
    """Every hook stores what its layer returns by another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.way, self.found = way, dict[Any, torch.Tensor]()
        self.names = {id(layer): name for name, layer in self.net.named_children()}
        self.wanted = {id(self.net[0])}
        self.in_order, self.last = [id(layer) for layer in self.net], id(self.net[2])
        self.places = tuple(self.in_order)
        self.items: queue.Queue[torch.Tensor] = queue.Queue()
        for layer in self.net:
            layer.register_forward_hook(self.store)

    def store(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self.way == "context variable":
            VARIABLE.set(output)
        elif self.way == "queue":
            self.items.put(output)
        elif self.way == "dict by ids":
            self.found[self.names.get(id(layer), "?")] = output
        elif self.way in ("list of ids", "tuple of ids"):
            ids = self.in_order if self.way == "list of ids" else self.places
            self.found[ids.index(id(layer)) if id(layer) in ids else "?"] = output
        elif id(layer) in self.wanted if self.way == "set of ids" else id(layer) == self.last:
            self.found["wanted"] = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.clear()
        self.net(x)
        if self.way == "context variable":
            return VARIABLE.get()
        if self.way == "queue":
            return torch.stack([self.items.get() for _ in self.net]).sum(0)
        return torch.stack(list(self.found.values())).sum(0)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    "way", ["context variable", "dict by ids", "list of ids", "tuple of ids", "set of ids", "an id"]
)
def test_what_hooks_store_by_other_ways_is_followed(way: str, has_run: bool) -> None:
    model = Stores(way).eval()
    if has_run:
        model(torch.rand(2, 4))
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["output"], ["net.0", "net.1", "output"]])
def test_queue_that_hooks_fill_keeps_no_trace_waiting(names: list[str]) -> None:
    """Where the hooks do not run, `get` would wait for ever. What is in the queue is a state, which is refused."""
    with pytest.raises(featx.TraceError, match="changes the attribute 'items'"):
        featx.create_feature_extractor(Stores("queue").eval(), names, example_inputs=torch.rand(2, 4))


TABLE = torch.arange(4.0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + TABLE


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_of_torch_open_no_layer() -> None:
    model, x = Normed().eval(), torch.rand(2, 4)
    traced = featx.trace(model, x)
    assert len(traced.graph.find_nodes(op="call_module", target="linear")) == 1
    assert torch.equal(traced(x), model(x))


class Registry:
    found: dict[str, torch.Tensor] = {}

    @classmethod
    def put(cls, value: torch.Tensor) -> None:
        cls.found["x"] = value


class StoresByRegistry(nn.Module):
    """The hook calls a function that stores, which no source of the hook shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.net[0].register_forward_hook(lambda layer, inputs, output: Registry.put(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + Registry.found["x"]


@pytest.mark.parametrize("has_run", [False, True])
def test_what_a_hook_stores_by_another_function_is_followed(has_run: bool) -> None:
    Registry.found.clear()
    model = StoresByRegistry().eval()
    if has_run:
        model(torch.rand(2, 4))
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


def test_attribute_of_a_layer_that_a_hook_sets_is_followed() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.first.register_forward_hook(lambda layer, inputs, output: setattr(layer, "rows", output.shape[0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) * getattr(self.first, "rows")  # noqa: B009

    model = Reads().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


def test_calls_that_a_hook_counts_are_a_state() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.layer.calls = 0  # type: ignore[assignment]
            self.layer.register_forward_hook(count)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * getattr(self.layer, "calls")  # noqa: B009

    def count(layer: Any, inputs: Any, output: Any) -> None:
        layer.calls += 1

    with pytest.raises(featx.TraceError, match="changes the attribute 'calls'"):
        featx.create_feature_extractor(Reads().eval(), ["output"], example_inputs=torch.rand(2, 4))


def put(store: dict[str, Tensor], name: str, module: nn.Module, args: Any, output: Tensor) -> None:
    store[name] = output


class Taps(nn.Module):
    """A hook keeps the output of a layer, which forward adds later, as perceptual losses and dense predictors do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.head, self.features = nn.Linear(4, 4), nn.Linear(4, 2), dict[str, Tensor]()
        hooks: dict[str, Any] = {
            "partial": functools.partial(put, self.features, "layer"),
            "lambda": lambda module, args, output: self.features.update(layer=output),
            "method": self.keep,
        }
        self.layer.register_forward_hook(hooks[way])

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["layer"] = output

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.layer(x))
        return y + self.features["layer"][:, :2]


@pytest.mark.parametrize("names", [["layer"], ["head"], ["output"], ["layer", "head", "output"]], ids=" ".join)
@pytest.mark.parametrize("way", ["partial", "lambda", "method"])
def test_single_values_of_a_model_that_reads_what_its_hooks_keep(way: str, names: list[str]) -> None:
    model = Taps(way).eval()
    x = torch.rand(3, 4)
    found = featx.create_feature_extractor(model, names, example_inputs=torch.rand(2, 4))(x)
    expected = {"layer": model.layer(x), "head": model.head(model.layer(x)), "output": model(x)}
    assert all(torch.equal(found[name], expected[name]) for name in names)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.last(x + y)


def asks_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "need_weights": True, "average_attn_weights": False}


def writes_that(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    kwargs["need_weights"] = True


def updates_that(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    kwargs.update(need_weights=True)


@pytest.mark.parametrize("names", [["last"], ["attention", "last"], ["output"]])
@pytest.mark.parametrize(
    "hook", [asks_for_weights, lambda *given: asks_for_weights(*given), writes_that, updates_that],
    ids=["returns", "lambda", "writes", "updates"],
)  # fmt: skip
def test_hook_that_lets_attention_return_its_weights_is_followed(hook: Callable[..., Any], names: list[str]) -> None:
    model, kept = Attends().eval(), {}
    model.attention.register_forward_pre_hook(hook, with_kwargs=True)
    x = torch.rand(2, 3, 4)
    extractor = featx.create_feature_extractor(model, names, example_inputs=x)
    for name, module in (("attention", model.attention), ("last", model.last), ("output", model)):
        module.register_forward_hook(lambda module, args, out, name=name: kept.update({name: out}))
    model(x)
    for name, found in extractor(x).items():
        expected = kept[name]
        assert all(map(torch.equal, found, expected)) if isinstance(expected, tuple) else torch.equal(found, expected)


def test_hook_that_only_looks_leaves_attention_one_node() -> None:
    model, seen = Attends().eval(), []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(len(args))

    model.attention.register_forward_pre_hook(look, with_kwargs=True)
    x = torch.rand(2, 3, 4)
    assert "attention" in featx.get_graph_node_names(model, example_inputs=x)[1]
    assert not seen
