from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import Graph, Node, create_feature_extractor
from featx.ir.effects import CallEffects, Effects
from featx.ir.module_effects import module_effects
from featx.ir.operator_facts import facts_of
from featx.tracing.guards import guards, input_checks
from featx.tree import clone_tensors

# -- against what torch really does -----------------------------------------------------------------------------------

ARGUMENTS: list[tuple[Any, ...]] = [
    (), (0,), (1,), (-1,), (1, 1), (0, 0), (0, 1), ((2, 2),), (2, 2), ((1, 1),), (torch.float32,), (0.0,), (1.0,),
    (0.0, False), (0.5, False), (None,), ((0, 0),), (0, (1, 2)), ([0],), (0, 0, 2), (0, 0, 1), ((0,), (0,)),
]  # fmt: skip
# Not called: they need another device, change the process, run for ever, or hand out memory outside torch.
SKIPPED = {
    "backward", "cuda", "xpu", "ipu", "share_memory_", "record_stream", "module_load", "numpy", "map_", "map2_",
    "apply_", "save", "load", "seed", "initial_seed", "manual_seed", "from_file", "compile", "init_num_threads",
    "index", "resize",
}  # fmt: skip


def fresh() -> torch.Tensor:
    return torch.arange(1.0, 5.0).reshape(2, 2)


def tensors_in(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor) and item.layout == torch.strided]


def missed(op: str, target: Any, call: Callable[..., Any]) -> set[str]:
    """Call with many arguments and return which effects happened that `Effects` does not know of."""
    found: set[str] = set()
    for arguments in ARGUMENTS:
        tensor = fresh()
        random_state = torch.get_rng_state()
        try:
            results = tensors_in(call(tensor, *arguments))
        except Exception:
            continue  # most calls with most arguments are refused, in all the ways that torch has
        graph = Graph()
        x = graph.placeholder("x")
        effects = Effects(graph).of(graph.create_node(op, target, (x, *arguments)))
        memory = tensor.untyped_storage().data_ptr()
        if any(result.untyped_storage().data_ptr() == memory for result in results) and x not in effects.shares:
            found.add("shares")
        if not torch.equal(tensor, fresh()) and x not in effects.writes:
            found.add("writes")
        if not torch.equal(torch.get_rng_state(), random_state) and not effects.is_random:
            found.add("draws")
    return found


def report(calls: dict[str, tuple[str, Any, Callable[..., Any]]]) -> dict[str, set[str]]:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        checked = {name: missed(*call) for name, call in calls.items()}
    return {name: effects for name, effects in checked.items() if effects}


@pytest.mark.slow
def test_every_tensor_method_writes_shares_and_draws_no_more_than_is_known() -> None:
    calls: dict[str, Any] = {}
    for name in dir(torch.Tensor):
        if name not in SKIPPED and not name.startswith("_") and callable(getattr(torch.Tensor, name)):
            calls[name] = ("call_method", name, getattr(torch.Tensor, name))
    assert len(calls) > 400
    assert report(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("library", [torch, functional, torch.fft, torch.linalg, torch.special, nn.init])
def test_every_function_of_torch_writes_shares_and_draws_no_more_than_is_known(library: Any) -> None:
    # The functions of `torch` itself that are written in Python and set something for the whole process are left out.
    kinds = ("builtin_function_or_method",) if library is torch else ("builtin_function_or_method", "function")
    calls: dict[str, Any] = {}
    for name, function in vars(library).items():
        if name not in SKIPPED and not name.startswith(("_", "set_")) and type(function).__name__ in kinds:
            calls[name] = ("call_function", function, function)
    assert len(calls) > 10
    assert report(calls) == {}


# -- by hand ----------------------------------------------------------------------------------------------------------


def effects_of(build: Callable[[Graph, Node, Node], Node], root: nn.Module | None = None) -> CallEffects:
    graph = Graph()
    return Effects(graph, root).of(build(graph, graph.placeholder("x"), graph.placeholder("y")))


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "writes", "shares"),
    [
        (torch.mul, "x2", {}, "", ""),
        (torch.clone, "x", {}, "", ""),
        (torch.cat, "l", {}, "", ""),
        (functional.gelu, "x", {}, "", ""),
        (functional.conv2d, "xy", {}, "", ""),
        (operator.add, "x2", {}, "", ""),
        (operator.add, "xy", {}, "", "xy"),
        (operator.mul, "xy", {}, "", "xy"),
        (operator.mul, "x2", {}, "", "x"),
        (operator.mul, "xf", {}, "", ""),
        (operator.or_, "xy", {}, "", "xy"),
        (operator.ior, "xy", {}, "x", "xy"),
        (torch.neg, "x", {"out": "y"}, "y", "y"),
        (torch.sort, "x", {"out": "l"}, "xy", "xy"),
        (torch.relu_, "x", {}, "x", "x"),
        (functional.relu, "x", {}, "", ""),
        (functional.relu, "x", {"inplace": True}, "x", "x"),
        (functional.relu, "x", {"inplace": False}, "", ""),
        (functional.leaky_relu, "x2t", {}, "x", "x"),
        (operator.iadd, "xy", {}, "x", "xy"),
        (operator.setitem, "x2y", {}, "x", "xy"),
        (operator.getitem, "x2", {}, "", "x"),
        (getattr, "xs", {}, "", "x"),
        (torch.Tensor.add_, "xy", {}, "x", "x"),
        (torch.Tensor.copy_, "xy", {}, "x", "x"),
        (torch.ops.aten.add_.Tensor, "xy", {}, "x", "x"),
        (torch.ops.aten.add.Tensor, "xy", {}, "", ""),
        (torch.ops.aten.view.default, "xl", {}, "", "xy"),
        (torch.linalg.inv, "x", {"out": "y"}, "y", "y"),
        (nn.init.zeros_, "x", {}, "x", "x"),
        (torch.chunk, "x2", {}, "", "x"),
    ],
)
def test_function_writes_and_shares(target: Any, args: str, kwargs: dict[str, Any], writes: str, shares: str) -> None:
    def build(graph: Graph, x: Node, y: Node) -> Node:
        values: dict[str, Any] = {"x": x, "y": y, "2": 2, "t": True, "f": 0.5, "l": [x, y], "s": "real"}
        given = {key: values.get(value, value) if isinstance(value, str) else value for key, value in kwargs.items()}
        return graph.call_function(target, tuple(values[letter] for letter in args), given)

    effects = effects_of(build)
    assert ("".join(names(effects.writes)), set("".join(names(effects.shares))) >= set(shares)) == (writes, True)
    if not shares:
        assert effects.shares == ()


@pytest.mark.parametrize(
    ("known", "is_tensor"),
    [
        (lambda graph, x: graph.call_function(torch.relu, (x,)), True),
        (lambda graph, x: graph.call_method("sigmoid", (x,)), True),
        (lambda graph, x: graph.call_module("linear", (x,)), True),
        (lambda graph, x: graph.get_attr("linear.weight"), True),
        (lambda graph, x: graph.call_function(operator.matmul, (x, x)), True),
        (lambda graph, x: graph.call_function(operator.add, (x, graph.call_method("view", (x, -1)))), True),
        (lambda graph, x: graph.call_function(operator.add, (x, x)), False),
        (lambda graph, x: graph.call_module("memory", (x,)), False),
        (lambda graph, x: graph.call_module("nothing", (x,)), False),
        (lambda graph, x: graph.call_method("chunk", (x, 2)), False),
        (lambda graph, x: graph.call_method("max", (x, 1)), False),
        (lambda graph, x: graph.call_function(list, (x,)), False),
    ],
)
def test_sum_is_fresh_if_one_operand_is_known_to_be_a_tensor(known: Any, is_tensor: bool) -> None:
    def build(graph: Graph, x: Node, y: Node) -> Node:
        return graph.call_function(operator.add, (y, known(graph, x)))

    root = nn.ModuleDict({"linear": nn.Linear(2, 2), "memory": nn.LSTM(2, 2), "nothing": nn.Identity()})
    assert (effects_of(build, root).shares == ()) == is_tensor


@pytest.mark.parametrize(
    ("method", "writes", "shares"),
    [("add_", "x", "x"), ("add", "", ""), ("view", "", "x"), ("copy_", "x", "x"), ("__setitem__", "x", "x"),
     ("__iadd__", "x", "x"), ("__add__", "", ""), ("requires_grad_", "x", "x"), ("fill_", "x", "x")],
)  # fmt: skip
def test_method_writes_and_shares(method: str, writes: str, shares: str) -> None:
    effects = effects_of(lambda graph, x, y: graph.call_method(method, (x, 1)))
    assert ("".join(names(effects.writes)), "".join(names(effects.shares))) == (writes, shares)


def test_unknown_function_may_do_anything() -> None:
    effects = effects_of(lambda graph, x, y: graph.call_function(fresh, (x, y)))
    assert (names(effects.writes), names(effects.shares)) == (["x", "y"], ["x", "y"])
    assert effects.is_opaque
    assert effects.is_random


@pytest.mark.parametrize("norm", [functional.batch_norm, functional.instance_norm])
def test_normalisation_writes_its_statistics(norm: Any) -> None:
    graph = Graph()
    x, mean, variance = [graph.placeholder(name) for name in ("x", "mean", "variance")]
    assert Effects(graph).of(graph.call_function(norm, (x, mean, variance))).writes == (mean, variance)


@pytest.mark.parametrize(
    ("norm", "options"),
    [(functional.batch_norm, {"training": False}), (functional.instance_norm, {"use_input_stats": False})],
)
@pytest.mark.parametrize("by_position", [True, False])
def test_normalisation_by_given_statistics_writes_nothing(
    norm: Any, options: dict[str, bool], by_position: bool
) -> None:
    graph = Graph()
    x, mean, variance = [graph.placeholder(name) for name in ("x", "mean", "variance")]
    args = (x, mean, variance, None, None, *options.values()) if by_position else (x, mean, variance)
    node = graph.call_function(norm, args, {} if by_position else options)
    assert Effects(graph).of(node).writes == ()
    statistics = torch.zeros(3), torch.ones(3)
    norm(torch.rand(2, 3, 4), *statistics, **options)
    assert torch.equal(statistics[0], torch.zeros(3))
    assert torch.equal(statistics[1], torch.ones(3))


def test_a_lookup_that_scales_its_weight_writes_it_beside_one_that_does_not() -> None:
    graph = Graph()
    ids, weight = graph.placeholder("ids"), graph.placeholder("weight")
    plain, scaling = [graph.call_function(functional.embedding, (ids, weight, *more)) for more in ((), (None, 1.0))]
    effects = Effects(graph)
    assert effects.of(plain).writes == ()
    assert weight in effects.of(scaling).writes


@pytest.mark.parametrize("check", [torch._assert, torch._check])
def test_assertions_are_checks(check: Any) -> None:
    assert effects_of(lambda graph, x, y: graph.call_function(check, (x, "message"))).is_check


@pytest.mark.parametrize("switch", [torch.manual_seed, torch._C._set_grad_enabled])
def test_switches_change_global_state(switch: Any) -> None:
    assert effects_of(lambda graph, x, y: graph.call_function(switch, (1,))).changes_global_state


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "is_random"),
    [
        (torch.rand, (3,), {}, True),
        (torch.zeros, (3,), {}, False),
        (torch.bernoulli, (), {}, True),
        (torch.ops.aten.bernoulli.default, (), {}, True),
        (functional.dropout, (), {}, True),
        (functional.dropout, (0.5, False), {}, False),
        (functional.dropout, (0.5,), {"training": True}, True),
        (functional.dropout2d, (), {"training": False}, False),
        (torch.dropout, (0.5, False), {}, False),
        (functional.rrelu, (), {}, False),
        (functional.alpha_dropout, (), {}, False),
        (functional.feature_alpha_dropout, (0.5,), {}, False),
        (functional.alpha_dropout, (0.5, True), {}, True),
        (functional.rrelu, (), {"training": True}, True),
        (functional.scaled_dot_product_attention, (), {}, False),
        (functional.scaled_dot_product_attention, (), {"dropout_p": 0.1}, True),
        (functional.scaled_dot_product_attention, (1, 1, None, 0.1), {}, True),
        (functional.multi_head_attention_forward, (1, 1, 16, 4, None, None, None, None, False, 0.0), {}, False),
        (functional.multi_head_attention_forward, (1, 1, 16, 4, None, None, None, None, False, 0.1), {}, True),
        (
            functional.multi_head_attention_forward,
            (1, 1, 16, 4, None, None, None, None, False, 0.1),
            {"training": False},
            False,
        ),
    ],
)
def test_draws_are_known(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_random: bool) -> None:
    effects = effects_of(lambda graph, x, y: graph.call_function(target, (x, *args), kwargs))
    assert effects.is_random is is_random


def test_draw_that_depends_on_a_traced_flag_is_feared() -> None:
    assert effects_of(lambda graph, x, y: graph.call_function(functional.dropout, (x, 0.5, y))).is_random


# -- modules ----------------------------------------------------------------------------------------------------------


class Custom(nn.Module):
    pass


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


MODULES = [
    # module, writes its input, shares its input, is random, writes its state
    (nn.Linear(1, 1), False, False, False, False),
    (nn.ReLU(), False, False, False, False),
    (nn.ReLU(inplace=True), True, True, False, False),
    (nn.Identity(), False, True, False, False),
    (nn.Flatten(), False, True, False, False),
    (nn.Dropout(), False, True, True, False),
    (nn.Dropout().eval(), False, True, False, False),
    (nn.BatchNorm1d(1), False, False, False, True),
    (nn.BatchNorm1d(1).eval(), False, False, False, False),
    (nn.BatchNorm1d(1, track_running_stats=False), False, False, False, False),
    (nn.GRU(1, 1, 2, dropout=0.1), False, False, True, False),
    (nn.GRU(1, 1), False, False, False, False),
    (nn.FractionalMaxPool2d(2, output_size=1).eval(), False, False, True, False),
    (nn.Sequential(), False, True, False, False),
    (nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True)), False, False, False, False),
    (nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), True, True, False, False),
    (nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1))), False, False, False, True),
    (Custom(), True, True, True, True),
    (Custom().eval(), True, True, True, True),
    (hooked(nn.Linear(1, 1)), True, True, True, True),
    (nn.Sequential(hooked(nn.Linear(1, 1)).eval()), True, True, True, True),
]


@pytest.mark.parametrize(("module", "writes", "shares", "is_random", "writes_state"), MODULES)
def test_effects_of_a_module(
    module: nn.Module, writes: bool, shares: bool, is_random: bool, writes_state: bool
) -> None:
    root = nn.Module()
    root.inner = nn.Sequential(module)
    effects = effects_of(lambda graph, x, y: graph.call_module("inner.0", (x,)), root)
    assert (names(effects.writes), names(effects.shares)) == (["x"] * writes, ["x"] * shares)
    assert (effects.is_random, effects.writes_state) == (is_random, writes_state)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.ReLU(), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Dropout(), nn.Softmax(1),
     nn.Upsample(scale_factor=1), nn.LayerNorm(2), nn.Hardswish(inplace=True), nn.BatchNorm1d(2), nn.Dropout().eval(),
     nn.ZeroPad1d(0), nn.AdaptiveAvgPool1d(2), nn.ELU(inplace=True),
     nn.Sequential(nn.Identity(), nn.SiLU(inplace=True))],
)  # fmt: skip
def test_module_writes_and_shares_no_more_than_is_known(module: nn.Module) -> None:
    tensor = -fresh().reshape(2, 1, 2) if isinstance(module, nn.Upsample | nn.ZeroPad1d) else -fresh()
    before = tensor.clone()
    with torch.no_grad():
        result = module(tensor)
    writes, shares = module_effects(module)
    assert writes or torch.equal(tensor, before)
    assert shares or result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_module_without_a_root_may_do_anything() -> None:
    effects = effects_of(lambda graph, x, y: graph.call_module("layer", (x,)))
    assert (names(effects.writes), effects.is_opaque) == (["x"], True)


def test_effects_that_are_only_feared_are_marked() -> None:
    root = nn.Module()
    root.known, root.unknown = nn.ReLU(inplace=True), Custom()
    assert not effects_of(lambda graph, x, y: graph.call_module("known", (x,)), root).is_opaque
    assert effects_of(lambda graph, x, y: graph.call_module("unknown", (x,)), root).is_opaque


@pytest.mark.parametrize("op", ["placeholder", "get_attr", "output"])
def test_other_opcodes_do_nothing(op: str) -> None:
    assert effects_of(lambda graph, x, y: graph.create_node(op, "z", (x,))) == CallEffects()


@pytest.mark.parametrize(
    ("name", "writes"),
    [("add_", True), ("__setitem__", True), ("setitem", True), ("iadd", True), ("__iadd__", True), ("delitem", True),
     ("add", False), ("index", False), ("isnan", False), ("__add__", False), ("no_such_", False)],
)  # fmt: skip
def test_name_of_an_operator_tells_whether_it_writes(name: str, writes: bool) -> None:
    assert facts_of(name).writes_first is writes


def test_name_of_an_operator_tells_whether_it_draws() -> None:
    assert [facts_of(name).draws for name in ("rand", "dropout", "relu")] == [True, True, False]


def test_copy_that_featx_makes_is_fresh_and_writes_nothing() -> None:
    graph = Graph()
    node = graph.call_function(clone_tensors, (graph.placeholder("x"),))
    assert Effects(graph).of(node) == CallEffects()


MODULES = (guards, input_checks)
CHECKS = [value for module in MODULES for name, value in vars(module).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_a_traced_graph_checks_changes_nothing(check: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    effects = Effects(graph, nn.Module()).of(graph.call_function(check, (x, 1, "x")))
    assert effects.is_check
    assert not effects.writes


@pytest.fixture
def operators_of_a_library() -> Iterator[Any]:
    with torch.library._scoped_library("featx_tests", "DEF") as library:
        library.define("scale(Tensor(a0!) x) -> ()")
        library.impl("scale", lambda x: (x.mul_(2), None)[1], "CompositeExplicitAutograd")
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.define("plain(Tensor x) -> Tensor")
        yield torch.ops.featx_tests


@pytest.mark.parametrize("is_overload", [True, False])
def test_operators_of_a_library_do_what_their_schemas_and_tags_say(
    operators_of_a_library: Any, is_overload: bool
) -> None:
    graph = Graph()
    x = graph.placeholder("x")

    def effects(name: str) -> CallEffects:
        operator = getattr(operators_of_a_library, name)
        return Effects(graph).of(graph.call_function(operator.default if is_overload else operator, (x,)))

    assert effects("scale").writes == (x,)
    assert effects("noise").is_random
    assert effects("plain") == CallEffects()


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch.ops.featx_tests.scale(y)
        return self.second(y)


@pytest.mark.usefixtures("operators_of_a_library")
def test_operator_of_a_library_that_writes_is_kept_in_an_extractor() -> None:
    torch.manual_seed(0)
    model, x = Scales().eval(), torch.rand(2, 4)
    extractor = create_feature_extractor(model, ["first", "second"], example_inputs=x)
    with torch.no_grad():
        found = extractor(x)
        assert torch.equal(found["first"], model.first(x))
        assert torch.equal(found["second"], model(x))


def test_operator_of_torch_writes_the_statistics_that_its_schema_leaves_out() -> None:
    graph = Graph()
    x, mean, variance = (graph.placeholder(name) for name in ("x", "mean", "variance"))
    arguments = (x, None, None, mean, variance, True, 0.1, 1e-5)
    for function in (torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm.default):
        assert Effects(graph).of(graph.call_function(function, arguments)).writes == (mean, variance)


class NoisyInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5, training=True)


class TwoDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noisy = NoisyInEval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noisy(x)
        return torch.rand_like(x)


def test_an_attribute_called_dropout_says_nothing_of_a_class_of_the_users() -> None:
    model, x = TwoDraws().eval(), torch.rand(4)
    extractor = create_feature_extractor(
        model,
        ["rand_like"],
        tracer="symbolic",
        tracer_kwargs={"leaf_modules": [NoisyInEval]},
        suppress_diff_warning=True,
    )
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert torch.equal(extractor(x)["rand_like"], expected)


def test_a_call_that_leaves_attributes_has_side_effects() -> None:
    assert CallEffects(leaves_attributes=True).has_side_effects
    assert not CallEffects(is_random=True).has_side_effects
