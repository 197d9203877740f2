"""Replica: it computes what the model does, its attributes lead to its own modules, and the model is only read."""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import gc
import io
import itertools
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

import featx
from featx.tracing.replica.replica import Replica, replica_of
from featx.tracing.signals import Untraceable, WritesSharedTensor
from tests.ids import without_address

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Kind(enum.Enum):
    ONE = 1


class Net(nn.Module):
    """A model with an attribute `held`."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(8.0).view(2, 4))
        self.register_buffer("row", self.table[1])
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.row


def twin_of(model: nn.Module, **options: Any) -> Any:
    return Replica(model, **options).root


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=3),
    "swin_t": lambda: torchvision.models.swin_t(num_classes=3),
    "convnext": lambda: timm.create_model("convnext_atto", num_classes=3),
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3),
    "lstm": lambda: nn.Sequential(nn.Flatten(2), nn.LSTM(64 * 64, 5, bidirectional=True, batch_first=True)),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(3 * 64 * 64, 3))),
    "parametrized": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(3 * 64 * 64, 3))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("copies_tensors", ["none", "buffers", "all"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_replica_computes_what_the_model_computes(name: str, copies_tensors: str) -> None:
    model = MODELS[name]().eval()
    images = torch.rand(2, 3, 64, 64)
    expected, found = model(images), Replica(model, copies_tensors=copies_tensors).root(images)
    assert torch.equal(found[0], expected[0])
    assert type(Replica(model).root) is type(model)


def test_paths_and_originals_are_those_of_the_model() -> None:
    model = torchvision.models.resnet18()
    replica = Replica(model)
    assert list(replica.paths.values()) == [path for path, _ in model.named_modules()]
    assert all(replica.originals[twin] is model.get_submodule(path) for twin, path in replica.paths.items())
    assert set(replica.paths).isdisjoint(model.modules())


def test_tensors_are_shared_by_default() -> None:
    model = Net()
    twin = twin_of(model)
    assert twin.linear.weight is model.linear.weight
    assert twin.table is model.table
    assert twin._parameters is not model._parameters


def test_copied_buffers_share_memory_as_those_of_the_model_do() -> None:
    model = Net()
    replica = Replica(model, copies_tensors="buffers")
    twin: Any = replica.root
    twin.table[1] = 7.0
    assert twin.row.tolist() == [7.0] * 4
    assert model.row.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert twin.linear.weight is model.linear.weight
    assert replica.original_of(twin.table) is model.table


# For each kind of attribute: how to make it, and what forward may do to it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda held: held.append(2)),
    "nested list": (lambda: [[[[1]]]], lambda held: held[0][0][0].append(2)),
    "dict": (lambda: {"a": {"b": 1}}, lambda held: held["a"].update(b=2)),
    "ordered dict": (lambda: collections.OrderedDict(a=1), lambda held: held.popitem()),
    "default dict": (lambda: collections.defaultdict(list), lambda held: held["a"].append(1)),
    "counter": (lambda: collections.Counter("ab"), lambda held: held.update("a")),
    "set": (lambda: {1}, lambda held: held.add(2)),
    "deque": (lambda: collections.deque([1], 3), lambda held: held.append(2)),
    "user dict": (lambda: collections.UserDict(a=1), lambda held: held.update(a=2)),
    "tuple of lists": (lambda: ([1],), lambda held: held[0].append(2)),
    "namespace": (lambda: types.SimpleNamespace(a=[1]), lambda held: held.a.append(2)),
    "object": (lambda: Holder(Holder(Holder(Holder([1])))), lambda held: held.value.value.value.value.append(2)),
    "slots": (lambda: Slotted([1]), lambda held: held.value.append(2)),
    "queue": (lambda: _filled(queue.Queue()), lambda held: held.get_nowait()),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1, 2]), next),
    "iterator": (lambda: iter([1, 2]), next),
    "array": (lambda: array.array("i", [1]), lambda held: held.append(2)),
    "bytearray": (lambda: bytearray(b"a"), lambda held: held.append(2)),
    "bytes in memory": (lambda: io.BytesIO(b"ab"), lambda held: held.write(b"cde")),
    "numpy array": (lambda: np.zeros(3), lambda held: held.fill(1)),
    "generator of Python": (lambda: random.Random(3), lambda held: held.random()),
    "generator of numpy": (lambda: np.random.default_rng(3), lambda held: held.random()),
    "generator of torch": (lambda: torch.Generator(), lambda held: torch.rand(1, generator=held)),
    "thread local": (lambda: _with(threading.local(), value=1), lambda held: setattr(held, "value", 2)),
    "closure": (lambda: _counting(), lambda held: held()),
    "attribute of a function": (lambda: _with(lambda: None, calls=1), lambda held: setattr(held, "calls", 2)),
    "default of a function": (lambda: _with_default(), lambda held: held()),
    "method of a list": (lambda: [1].append, lambda held: held(2)),
    "cached function": (lambda: functools.lru_cache(_counting()), lambda held: held()),
}  # fmt: skip


def _filled(held: Any) -> Any:
    held.put(1)
    return held


def _with(held: Any, **attributes: Any) -> Any:
    vars(held).update(attributes)
    return held


def _counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def _with_default() -> Callable[..., int]:
    def remember(calls: list[int] = []) -> int:  # noqa: B006 - that is what is tested
        calls.append(1)
        return len(calls)

    return remember


def _describe(held: Any) -> Any:
    """What the next call would find, in a form that compares."""
    if isinstance(held, (types.FunctionType, functools._lru_cache_wrapper)):
        function = getattr(held, "__wrapped__", held)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return repr((cells, function.__dict__, function.__defaults__))
    if isinstance(held, types.BuiltinMethodType):
        return repr(held.__self__)
    if isinstance(held, queue.Queue):
        return list(held.queue)
    if isinstance(held, io.BytesIO):
        return held.getvalue(), held.tell()
    if isinstance(held, random.Random):
        return held.getstate()
    if isinstance(held, np.random.Generator):
        return repr(held.bit_generator.state)
    if isinstance(held, torch.Generator):
        return held.get_state().tolist()
    if hasattr(held, "__next__"):
        return repr(held.__reduce__())
    if isinstance(held, (Holder, Slotted)):
        return _describe(held.value)
    return repr(getattr(held, "__dict__", None) or held)


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.filterwarnings("ignore:.*itertools.*:DeprecationWarning")
def test_what_the_replica_does_to_an_attribute_the_model_does_not_see(kind: str) -> None:
    make, change = CHANGES[kind]
    model = Net(make())
    before = _describe(model.held)
    change(twin_of(model).held)
    assert _describe(model.held) == before
    change(model.held)  # the description tells
    assert _describe(model.held) != before


def test_generator_cannot_be_copied_and_is_refused_when_it_is_used() -> None:
    model = Net(n for n in range(3))
    with pytest.raises(Untraceable, match=r"advances an iterator .*\(generator\)"):
        next(twin_of(model).held)
    assert next(model.held) == 0


class Leads(nn.Module):
    """Has attributes that lead back to itself and to its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.plain_list = [self.linear]
        self.by_module = {self.linear: "linear"}
        self.method = self.linear.extra_repr
        self.partial = functools.partial(Leads.call, self)
        self.closure = lambda: self.linear
        self.reference = weakref.ref(self.linear)
        self.helper = Holder({"owner": [self]})
        self.unregistered = [nn.BatchNorm1d(4)]
        self.linear.register_forward_hook(lambda module, args, output, owner=self: owner.seen.append(module))
        self.seen: list[Any] = []

    def call(self) -> nn.Module:
        return self.linear


def test_everything_that_leads_to_a_module_leads_to_that_of_the_replica() -> None:
    model = Leads()
    twin = twin_of(model)
    linear = twin.linear
    assert linear is not model.linear
    assert twin.plain_list == [linear]
    assert list(twin.by_module) == [linear]
    assert twin.method.__self__ is linear
    assert twin.partial() is linear
    assert twin.closure() is linear
    assert twin.reference() is linear
    assert twin.helper.value["owner"][0] is twin
    assert twin.unregistered[0] is not model.unregistered[0]
    linear(X)
    assert twin.seen == [linear]
    assert model.seen == []


SHARED: list[Any] = [
    Kind.ONE, nn.functional.relu, torch.float32, Net, object(), Holder.__init__, len, threading.Lock(), (1, "a"),
    nn.functional.max_pool2d,
]  # fmt: skip


@pytest.mark.parametrize("held", SHARED, ids=without_address)
def test_what_code_compares_by_identity_stays_itself(held: Any) -> None:
    assert twin_of(Net(held)).held is held


def test_state_of_the_hooks_of_the_replica_is_its_own() -> None:
    model = Net()
    twin = twin_of(model)
    twin.linear.register_forward_hook(lambda *args: None)
    twin.norm.register_forward_pre_hook(lambda *args: None)
    assert not model.linear._forward_hooks
    assert not model.norm._forward_pre_hooks
    assert not twin.norm._forward_hooks


def test_mode_of_the_replica_is_set_by_the_train_method_of_the_model() -> None:
    class Merging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.is_merged = False

        def train(self, mode: bool = True) -> Merging:
            if self.is_merged is mode:
                self.weight.data += -1.0 if mode else 1.0
                self.is_merged = not mode
            return super().train(mode)

    model = Merging().train()
    with pytest.raises(WritesSharedTensor):
        Replica(model, False)
    twin: Any = replica_of(model, False).root
    assert twin.is_merged
    assert not twin.training
    assert twin.weight.tolist() == [2.0, 2.0, 2.0]
    assert model.weight.tolist() == [1.0, 1.0, 1.0]
    assert model.training


def test_scripted_module_is_copied() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout())), nn.ReLU()).train()
    replica = Replica(model, False)
    assert not replica.root[0].training
    assert model[0].training
    assert "training" not in vars(model[0])
    assert list(replica.paths.values()) == [path for path, _ in model.named_modules()]
    assert torch.equal(replica.root(X), model.eval()(X))


def test_module_without_initialized_parameters_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="run the model once"):
        featx.trace(nn.Sequential(nn.LazyLinear(3)), X)


def test_deeply_nested_modules_are_copied() -> None:
    model: nn.Module = nn.Identity()
    for _ in range(500):
        model = nn.Sequential(model)
    assert len(Replica(model).paths) == 501


def test_tensor_in_a_list_that_a_trace_for_real_reads_is_the_model_s_own_in_the_graph() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [torch.ones(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.tables[0] if x.sum() > 0 else x

    model = Reading()
    traced = featx.trace(model, X)
    model.tables[0].fill_(3.0)
    assert torch.equal(traced(X), model(X))


class RegistersInForward(nn.Module):
    """Doubles what a block gives by a hook that it registers for the call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handle = self.block.register_forward_hook(lambda module, args, output: output * 2)
        x = self.block(x)
        handle.remove()
        return x + 1


def test_hook_that_forward_registers_is_that_of_one_module() -> None:
    model, x = RegistersInForward(), torch.rand(2, 3)
    traced = featx.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert not model.block._forward_hooks


@pytest.mark.parametrize("is_in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_compiled_submodule_is_traced_as_what_it_was_made_of(is_in_place: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if is_in_place:
        block.compile(backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), block if is_in_place else torch.compile(block, backend="eager"))
    x = torch.rand(3, 4)
    torch._dynamo.utils.counters.clear()
    names = featx.get_graph_node_names(model, example_inputs=x)[1]
    inside = "1.0" if is_in_place else "1._orig_mod.0"
    extractor = featx.create_feature_extractor(model, [inside, "1"], example_inputs=x)
    assert not torch._dynamo.utils.counters["stats"]
    assert names[1:3] == ["0", inside]
    found = extractor(torch.ones(2, 4))
    assert torch.equal(found[inside], block[0](model[0](torch.ones(2, 4))))
    assert torch.equal(found["1"], found[inside].relu())


def test_tuples_of_a_class_with_a_length_of_its_own_are_copied() -> None:
    class Pair(tuple[int, int]):  # as the irreducible representations of e3nn
        def __len__(self) -> int:
            raise NotImplementedError

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.pairs = (Pair((1, 2)), Pair((self.linear, 3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(iter(self.pairs[1]))(x)

    model, x = Holds().eval(), torch.rand(2, 3)
    assert torch.equal(featx.trace(model, x)(x), model(x))
    assert torch.equal(featx.create_feature_extractor(model, ["linear"], example_inputs=x)(x)["linear"], model(x))


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.parametrize("names", [["1"], ["1.linear", "output"]], ids=" ".join)
def test_forward_that_is_decorated_with_torch_compile_is_traced_as_it_was_written(names: list[str]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Decorated()).eval(), torch.rand(3, 4)
    before = torch._dynamo.utils.counters["frames"]["total"]
    extractor = featx.create_feature_extractor(model, names, example_inputs=x)
    assert torch._dynamo.utils.counters["frames"]["total"] == before  # nothing was compiled
    assert "forward" not in vars(model[1])
    with torch.no_grad():  # torch's compiler warns of gradients of what is no leaf
        assert torch.allclose(extractor(x + 1)[names[-1]], model[1].linear(model[0](x + 1)).relu())


class _Stored:
    """Stores what a layer returns, as fastai's hooks do."""

    deleted: ClassVar[list[str]] = []

    def __init__(self, layer: nn.Module) -> None:
        self.value: torch.Tensor | None = None
        self.handle = layer.register_forward_hook(self.store)

    def store(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.value = output

    def __del__(self) -> None:
        self.deleted.append("hook")


class _Register(type):
    classes: ClassVar[list[str]] = []

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        cls.classes.append(name)


class _GivesHooksBack(nn.Module, metaclass=_Register):
    subclasses: ClassVar[list[str]] = []
    deleted: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.stored = _Stored(self.first)

    def __init_subclass__(cls) -> None:
        cls.subclasses.append(cls.__name__)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        assert self.stored.value is not None
        return y + self.stored.value

    def __del__(self) -> None:
        self.stored.handle.remove()
        self.deleted.append(type(self).__name__)


def test_copies_of_a_model_give_back_nothing_that_it_holds() -> None:
    model = _GivesHooksBack().eval()
    x, y = torch.rand(2, 2, 3)
    with torch.no_grad():
        expected = model(y).clone()
        extractor = featx.create_feature_extractor(model, ["first", "output"], example_inputs=x)
        featx.nodes(model, x)
        featx.trace(model, x)
        with pytest.raises(featx.FeatxError):
            featx.create_feature_extractor(model, ["third"], example_inputs=x)
        gc.collect()
        assert (_GivesHooksBack.deleted, _Stored.deleted) == ([], [])
        assert (_GivesHooksBack.subclasses, _Register.classes) == ([], ["_GivesHooksBack"])
        assert (
            len(_GivesHooksBack.__subclasses__()) <= 1
        )  # what is remembered of classes keeps one, not one for each copy
        assert len(model.first._forward_hooks) == 1
        assert torch.equal(model(y), expected)
        assert torch.equal(extractor(y)["output"], expected)
    del model
    gc.collect()
    assert "_GivesHooksBack" in _GivesHooksBack.deleted


class _RemovesItsHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.handle = self.layer.register_forward_pre_hook(self.double, with_kwargs=True)

    def double(self, layer: nn.Module, args: tuple[torch.Tensor], kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.handle:
            return self.layer(x)


def test_a_handle_removes_the_hook_of_the_copy() -> None:
    model, x = _RemovesItsHook().eval(), torch.rand(2, 3)
    with contextlib.suppress(featx.TraceError):
        featx.trace(model, x)
    assert len(model.layer._forward_pre_hooks) == len(model.layer._forward_pre_hooks_with_kwargs) == 1
    replica = Replica(model).root
    replica(x)
    assert len(cast(Any, replica).layer._forward_pre_hooks_with_kwargs) == 0
    assert len(model.layer._forward_pre_hooks_with_kwargs) == 1
