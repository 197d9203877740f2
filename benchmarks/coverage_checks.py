"""Check whether featx's example tracer reaches a model, and whether what it computes is what the model computes.

Statuses of `Record.modes`, which has one outcome for each size of the inputs: `equal`; `refused`, the graph raises
`SpecializationError`; `different` and `fails`, which are failures; `model refuses`, the model does not take that size;
`not comparable`, the model does not give the same twice; `no such size`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import coverage_transformers
import models
import torch
from coverage_sizes import Inputs, of_one_sample, of_other_sizes
from models import seeded
from parity_records import EQUAL, TRACED, Outcome, Record, message_of
from parity_values import calls_of_modules, difference, is_out_of_memory, takes
from parity_workers import Check, Job
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

import featx
from featx.examples import Example, find_example

SIZES = ("traced", "batch", "size")
_MADE = ("trace", "extractor")
GPU_WAYS = tuple(f"{way}, {what}" for way in ("moved", "made there") for what in _MADE)
REFUSED = "refused"
DIFFERENT = "different"
FAILS = "fails"
MODEL_REFUSES = "model refuses"
NOT_COMPARABLE = "not comparable"
NO_SUCH_SIZE = "no such size"
_NOISE = 0.01
_DETECTED_SIDE = 160
# From so many parameters or pixels a side on, a model of timm runs on small images; from so many more in bfloat16, and
# what it computes is compared with the model itself, not with a copy.
_LARGE, _SIDE_OF_LARGE = 60_000_000, 256
_HUGE = 600_000_000
_LARGEST = 2_500_000_000
_SMALL_SIDES = (112, 128, 160, 192, 256)


def family_of(library: str, name: str) -> str:
    """Return the module that defines a model, within its library; for transformers the type of the config is both."""
    return name if library == "transformers" else models.family_of(library, name)


def start(folder: Path) -> Check:
    """Return the check that fills in a record."""
    checks: dict[str, Check] = {"exact": check_exact, "names": check_names, "gpu": check_gpu}
    return lambda record: checks[record.check](record)


JOB = Job(family_of, start)


def check_names(record: Record) -> None:
    """Fill in whether the names of a model are listed, in both modes; the model has no weights where it can."""
    if record.library == "transformers":
        model, example = coverage_transformers.build_running(record.model)
    else:
        model = models.build_without_weights(record.library, record.model)
        example = find_example(model.eval())
    record.parameters = _count(model)
    _list_names(record, model, example)


def check_exact(record: Record) -> None:
    """Fill in whether a trace, and an extractor of all names, compute what the model does, at three sizes of inputs.

    Eval mode, on the CPU. Weights are those of the model's own initialization and some noise, from a fixed seed, so
    that nothing that starts as zero hides a difference.
    """
    prepared = _prepared(record)
    if prepared is None:
        return
    model, example, names = prepared
    untouched = _Untouched(model if record.parameters > _LARGEST else copy.deepcopy(model))
    inputs: Inputs = (example.args, example.kwargs)
    try:
        try:
            runs = _Runs(model, example, *names)
        except featx.TraceError as error:
            if "Cache" not in str(error) or not coverage_transformers.leave_out_cache(model):
                raise
            record.note = message_of(error)
            untouched = _Untouched(copy.deepcopy(model))
            runs = _Runs(model, example, *(_list_names(record, model, example) or names))
    except Exception as error:  # whatever a trace raises is what the check found
        if is_out_of_memory(error):
            raise
        record.modes["traced"] = Outcome(FAILS, message_of(error))
        return
    record.pixels = runs.modules
    record.modes["traced"] = _compared(untouched, runs, inputs)
    record.modes["batch"] = _compared(untouched, runs, of_one_sample(inputs))
    record.modes["size"] = Outcome(NO_SUCH_SIZE)
    for other in of_other_sizes(inputs):
        record.modes["size"] = _compared(untouched, runs, other)
        if record.modes["size"].status != MODEL_REFUSES:
            break


def check_gpu(record: Record) -> None:
    """Fill in whether what featx makes of a model on the CPU, and on the GPU, computes there what the model does.

    Eval mode. There is an outcome for the trace and for the extractor, each made on the CPU and moved, and made of a
    model that is on the GPU; see `GPU_WAYS`.
    """
    torch.backends.cudnn.deterministic = True
    prepared = _prepared(record)
    if prepared is None:
        return
    model, example, names = prepared
    untouched = _Untouched(copy.deepcopy(model).to("cuda"))
    args, kwargs = tree_map_only(torch.Tensor, lambda leaf: leaf.to("cuda"), (example.args, example.kwargs))
    there = replace(example, args=args, kwargs=kwargs)
    for way, made_of, given in (("moved", model, example), ("made there", copy.deepcopy(model).to("cuda"), there)):
        try:
            names = names if way == "moved" else _list_names(record, made_of, given) or names
            runs = _Runs(copy.deepcopy(made_of), given, *names)
            runs.trace.to("cuda")
            runs.extractor.to("cuda")
        except Exception as error:  # whatever a trace raises is what the check found
            record.modes.update({f"{way}, {what}": Outcome(FAILS, message_of(error)) for what in _MADE})
            continue
        expected = [tensor.clone() for tensor in tensors_in(untouched.run((args, kwargs), is_watched=True))]
        problems = (
            lambda: _output_problem(runs, (args, kwargs), expected),  # noqa: B023
            lambda: _feature_problem(runs, (args, kwargs), untouched.outputs),  # noqa: B023
        )
        for what, problem in zip(_MADE, problems, strict=True):
            record.modes[f"{way}, {what}"] = _outcome(problem, what)


def _prepared(record: Record) -> tuple[nn.Module, Example, tuple[list[str], list[str]]] | None:
    """Return the model with shaken weights, its example, and its names in both modes; None if it has none of these."""
    model, example = _build(record)
    record.parameters = _count(model)
    _shake(model)
    names = _list_names(record, model, example)
    return None if names is None or example is None else (model, example, names)


def _build(record: Record) -> tuple[nn.Module, Example | None]:
    if record.library == "transformers":
        return coverage_transformers.build_running(record.model)
    if record.library == "timm":
        return _build_of_timm(record.model)
    model = models.build(record.library, record.model).eval()
    transform = getattr(model, "transform", None)
    if hasattr(transform, "min_size"):  # detection makes images larger, and all features at once would take 16 GiB
        transform.min_size = (_DETECTED_SIDE,)
    return model, find_example(model)


def _build_of_timm(name: str) -> tuple[nn.Module, Example | None]:
    """Return a model and its example: a large model for small images if it takes them, a huge one in bfloat16."""
    bare = models.build_without_weights("timm", name).eval()
    is_huge = _count(bare) > _HUGE
    *smaller, declared = models.input_shapes("timm", name, bare)
    made_for: int | None = None
    shape: tuple[int, ...] | None = None
    if _count(bare) > _LARGE or declared[-1] > _SIDE_OF_LARGE:
        sides = (side for side in _SMALL_SIDES if side < declared[-1])
        made_for = next((side for side in sides if models.can_be_made_for("timm", name, side)), None)
        ways = [(3, made_for, made_for)] if made_for else [each for each in smaller if takes(bare, each)]
        shape = next(iter(ways), None)
    del bare
    model, example = _made_of_timm(name, made_for, shape, is_huge)
    # Without values a model runs whose indices go too far.
    if shape is not None and example is not None and not _runs(model, example):
        model, example = _made_of_timm(name, None, None, is_huge)
    return model, example


def _made_of_timm(
    name: str, made_for: int | None, shape: tuple[int, ...] | None, is_huge: bool
) -> tuple[nn.Module, Example | None]:
    with models.floats_of(torch.bfloat16 if is_huge else torch.float32):
        with _quick_initialization() if is_huge else nullcontext():
            model = models.build("timm", name, side=made_for).eval()
        example = find_example(model)
        if shape is not None and example is not None:
            example = replace(example, args=(models.make_input(shape, 2),), kwargs={})
    return model, example


def _runs(model: nn.Module, example: Example) -> bool:
    try:
        _run(model, (example.args, example.kwargs))
    except Exception as error:  # whatever a model raises
        if is_out_of_memory(error):
            raise
        return False
    return True


@contextmanager
def _quick_initialization() -> Generator[None, None, None]:
    """Let truncated normal distributions be uniform ones: their inverse takes a minute for a billion weights."""
    with patch.object(torch.Tensor, "erfinv_", lambda tensor: tensor):
        yield


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _list_names(record: Record, model: nn.Module, example: Example | None) -> tuple[list[str], list[str]] | None:
    try:
        given = _given(model, example)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            names = featx.get_graph_node_names(model, example_inputs=given, tracer="example")
    except Exception as error:  # whatever a model raises in a trace is the answer
        if is_out_of_memory(error):
            raise
        record.featx = message_of(error)
        return None
    missing = [each.message for each in caught if "cannot be followed to its end" in str(each.message)]
    record.featx = message_of(missing[0]) if missing else TRACED
    return names


def _given(model: nn.Module, example: Example | None) -> Any:
    """Return `example` as featx takes it; None, so that featx looks for itself, where train mode needs another one."""
    if example is None or len((find_example(model, True) or example).args) != len(example.args):
        return None
    return example.kwargs or example.args


def _shake(model: nn.Module) -> None:
    with torch.no_grad(), seeded():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)


class _Untouched:
    """A copy of the model that featx has never seen, and what its modules return, call by call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules(remove_duplicate=True)}
        self.outputs: dict[str, list[list[torch.Tensor]]] = {}

    def run(self, inputs: Inputs, *, is_watched: bool) -> Any:
        if not is_watched:
            return _run(self._model, inputs)
        self.outputs = {}
        with self._watching():
            return _run(self._model, inputs)

    @contextmanager
    def _watching(self) -> Generator[None, None, None]:
        # One hook for all: modules with hooks of their own leave the fast paths of torch.nn.TransformerEncoder.
        handle = register_module_forward_hook(self._hook)
        try:
            yield
        finally:
            handle.remove()

    def _hook(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self.outputs.setdefault(path, []).append([tensor.clone() for tensor in tensors_in(output)])


class _Runs:
    """What featx makes of a model in eval mode: its trace, and an extractor of every name."""

    def __init__(self, model: nn.Module, example: Example, train_names: list[str], names: list[str]) -> None:
        self.trace = featx.trace(model, *example.args, **example.kwargs)
        # Some models cannot be traced in train mode, which is not asked here.
        modes = {"train_return_nodes": train_names[:1], "eval_return_nodes": names}
        extractor = featx.create_feature_extractor(
            model,
            **(modes if train_names else {"return_nodes": names}),
            suppress_diff_warning=True,
            example_inputs=_given(model, example),
            tracer="example",
        )
        self.extractor = extractor.eval()
        self.names = len(names)
        # Modules without a name inside them, and with none of their own, are kept whole and are no features.
        calls = calls_of_modules(self.extractor.eval_graph)
        self.calls = {name: call for name, call in calls.items() if name in set(names)}
        self.modules = len(self.calls)


def _compared(untouched: _Untouched, runs: _Runs, inputs: Inputs) -> Outcome:
    """Return the worse outcome of the trace and of the extractor."""
    try:
        expected = tensors_in(untouched.run(inputs, is_watched=True))
        expected = [tensor.clone() for tensor in expected]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return Outcome(MODEL_REFUSES, message_of(error))
    found = _outcome(lambda: _output_problem(runs, inputs, expected), "trace")
    features = _outcome(lambda: _feature_problem(runs, inputs, untouched.outputs), "features")
    order = (EQUAL, REFUSED, FAILS, DIFFERENT)
    worst = max(found, features, key=lambda outcome: order.index(outcome.status))
    if worst.status == EQUAL:
        finite = all(bool(tensor.isfinite().all()) for tensor in expected if tensor.is_floating_point())
        note = "" if finite else ", not all finite"
        return Outcome(EQUAL, f"{len(expected)} outputs{note}, {runs.modules} of {runs.names} features are modules")
    if worst.status == DIFFERENT:
        again = tensors_in(untouched.run(inputs, is_watched=False))
        if difference(again, expected):
            return Outcome(NOT_COMPARABLE, "the model itself gives something else the second time")
    return worst


def _outcome(problem_of: Callable[[], str], what: str) -> Outcome:
    try:
        problem = problem_of()
    except featx.SpecializationError as error:
        return Outcome(REFUSED, f"{what}: {message_of(error)}")
    except Exception as error:  # whatever a graph raises is what the check found
        if is_out_of_memory(error):
            raise
        return Outcome(FAILS, f"{what}: {message_of(error)}")
    return Outcome(DIFFERENT, f"{what}: {problem}") if problem else Outcome(EQUAL)


def _output_problem(runs: _Runs, inputs: Inputs, expected: list[torch.Tensor]) -> str:
    return difference(tensors_in(_run(runs.trace, inputs)), expected)


def _feature_problem(runs: _Runs, inputs: Inputs, outputs: dict[str, list[list[torch.Tensor]]]) -> str:
    features = _run(runs.extractor, inputs)
    problems: list[str] = []
    for name, (path, call) in runs.calls.items():
        calls = outputs.get(path, [])
        if call >= len(calls):
            problems.append(f"`{name}`: the model calls `{path}` {len(calls)} times only")
            continue
        problem = difference(tensors_in(features[name]), calls[call])
        if problem:
            problems.append(f"`{name}`: {problem}")
    return f"{len(problems)} of {len(runs.calls)} module calls: {'; '.join(problems[:3])}" if problems else ""


def _run(module: nn.Module, inputs: Inputs) -> Any:
    """Run a module from a fixed seed on copies of the inputs, and leave its buffers as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, inputs)
    with torch.no_grad(), seeded():
        result = module(*args, **kwargs)
        for buffer, before in buffers:
            buffer.copy_(before)
    return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside a value, also inside objects such as the caches of transformers."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list, dict)) or hasattr(value, "__dict__"):
        if id(value) in seen or isinstance(value, (nn.Module, type)) or callable(value):
            return
        seen.add(id(value))
        if isinstance(value, (tuple, list)):
            items: Any = value
        else:
            items = value.values() if isinstance(value, dict) else vars(value).values()
        for item in items:
            _collect(item, found, seen)
        seen.discard(id(value))  # one object may be in two places, and a graph returns an equal one in each
