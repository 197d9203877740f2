"""Turn a case and a way to trace into a verdict: what the model does and the traced module does not."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from differences import difference, snapshot
from inputs import Arguments, Case, as_dtype, built, calls, example
from running import Outcome, copied, generators, outer_state, run, seed, set_outer_state
from torch import nn

Trace = Callable[..., nn.Module]
LABELS_OF_OTHER_SIZES = {
    "other batch",
    "batch of 1",
    "batch as channels",
    "empty batch",
    "other channels",
    "other height",
    "other size",
}


@dataclass
class Verdict:
    """What came of a case.

    `invalid`: the model itself raises on the example. `refusals`: errors of the library at trace time. `equal` and
    `refused` hold labels of calls. `findings` are broken promises: the kind, where, and what.
    """

    invalid: str = ""
    traced: bool = False
    extracted: bool = False
    refusals: list[str] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    stop: bool = False

    @property
    def is_done(self) -> bool:
        """Whether what was found is enough."""
        return self.stop and bool(self.findings)

    @property
    def follows_sizes(self) -> bool:
        """Whether the traced module was compared on an input of other sizes."""
        return any(label in LABELS_OF_OTHER_SIZES for label in self.equal)

    def __str__(self) -> str:
        lines = [f"{kind} [{where}] {what}" for kind, where, what in self.findings]
        return "\n".join([*lines[:3], f"and {len(lines) - 3} more"] if len(lines) > 4 else lines)


@dataclass(frozen=True)
class Library:
    """What is under test. Errors of `errors` are allowed; `extractor` and `names` may be left out."""

    trace: Trace
    errors: type[Exception]
    extractor: Callable[..., nn.Module] | None = None
    names: Callable[..., tuple[list[str], list[str]]] | None = None


def judge(case: Case, library: Library, *, stop: bool = False) -> Verdict:
    """Compare the model of `case` with what `library` makes of it, on many inputs, in both modes.

    With `stop`, no more calls are made after the first finding.
    """
    verdict = Verdict(stop=stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with built(case) as model:
            outcome = run(model, example(case), grad=case.grad)
        if outcome.error is not None:
            verdict.invalid = f"{type(outcome.error).__name__}: {outcome.error}"
            return verdict
        with built(case) as reference, built(case) as model:
            _judge_trace(case, library, reference, model, verdict)
        if library.extractor is not None and library.names is not None and not verdict.is_done:
            with built(case) as reference, built(case) as model:
                _judge_extractor(case, library, reference, model, verdict)
    return verdict


# -- the whole graph ---------------------------------------------------------------------------------------------------


def _judge_trace(case: Case, library: Library, reference: nn.Module, model: nn.Module, verdict: Verdict) -> None:
    before, given = snapshot(model), example(case)
    traced = _traced(lambda: library.trace(model, *given[0], **given[1]), library, verdict, "trace", case)
    changed = difference(before, snapshot(model), "model") or difference(example(case), given, "example")
    if changed:
        verdict.findings.append(("changed by tracing", "trace", changed))
    # A cache outside the model may hold what the trace computed.
    outside = outer_state(reference)
    again, expected = (run(copy.deepcopy(each), example(case), grad=case.grad) for each in (model, reference))
    for each in (model, reference):
        set_outer_state(each, outside)
    what = difference(expected.result, again.result) if again.error is None else repr(again.error)
    if what:
        verdict.findings.append(("changed by tracing", "model run after the trace", what))
    if traced is None or verdict.is_done:
        return
    verdict.traced = True
    for mode in (case.training, not case.training):
        traced.train(mode)
        for label, arguments in calls(case):
            if (mode != case.training and label not in ("same sizes", "other batch", "example")) or verdict.is_done:
                continue
            where = label if mode == case.training else f"{label}, {'train' if mode else 'eval'} mode"
            reference = _compare(where, arguments, case, library, _Pair(reference.train(mode), model, traced), verdict)
    if not verdict.is_done:
        _judge_casts(case, library, _Pair(reference.train(case.training), model, traced.train(case.training)), verdict)


def _judge_casts(case: Case, library: Library, pair: _Pair, verdict: Verdict) -> None:
    """Compare what copies in other dtypes compute."""
    for dtype in (torch.float64, torch.bfloat16):
        outside, where = outer_state(pair.reference), f"as {dtype}"
        try:
            copies = [copy.deepcopy(each).to(dtype) for each in (pair.reference, pair.traced)]
        except RuntimeError:  # a tensor with history in an attribute
            return
        outcomes: list[Outcome] = []
        for each in copies:
            outcomes.append(run(each, as_dtype(example(case), dtype), grad=case.grad, gradients=case.grad))
            for model in (pair.reference, pair.model):
                set_outer_state(model, outside)
        expected, actual = outcomes
        if expected.error is not None:
            continue
        if actual.error is not None:
            _note_error(actual.error, where, library, verdict)
            continue
        findings = _differences(expected, actual)
        verdict.findings += [(kind, where, what) for kind, what in findings if what][:1]
        if not any(what for _, what in findings):
            verdict.equal.append(where)


@dataclass
class _Pair:
    reference: nn.Module
    model: nn.Module  # whose weights and buffers `traced` shares
    traced: nn.Module


def _compare(
    where: str, arguments: Arguments, case: Case, library: Library, pair: _Pair, verdict: Verdict
) -> nn.Module:
    """Run both once; return the reference, with the state after the call."""
    try:
        after = copy.deepcopy(pair.reference)
    except RuntimeError:  # a tensor with history in an attribute
        return pair.reference
    outside, grad = outer_state(pair.reference), case.grad != where.startswith("other grad mode")
    expected = run(after, arguments, grad=grad, gradients=grad)
    if expected.error is not None:
        set_outer_state(pair.reference, outside)
        return pair.reference
    actual = run(pair.traced, arguments, grad=grad, gradients=grad)
    if actual.error is not None:
        _note_error(actual.error, where, library, verdict)
        return _taken_back(pair, outside)
    findings = [*_differences(expected, actual), ("wrong state", _difference_of_state(after, pair.model))]
    found = [(kind, where, what) for kind, what in findings if what]
    verdict.findings += found[:1]
    if not found:
        verdict.equal.append(where)
    else:
        _equalize(pair.model, after)
    return after


def _differences(expected: Outcome, actual: Outcome) -> list[tuple[str, str]]:
    return [
        ("wrong value", difference(expected.result, actual.result)),
        ("wrong effect on inputs", difference(expected.inputs, actual.inputs, "input")),
        ("wrong generators", "" if expected.generators == actual.generators else "the random state differs afterwards"),
        ("wrong memory", "" if expected.memory == actual.memory else f"{expected.memory} is {actual.memory}"),
        ("wrong gradients", difference(expected.gradients, actual.gradients, "gradients")),
    ]


def _note_error(error: BaseException, where: str, library: Library, verdict: Verdict) -> None:
    if isinstance(error, library.errors):
        verdict.refused.append(where)
    else:
        verdict.findings.append(("raw error", where, f"{type(error).__name__}: {error}"))


def _difference_of_state(expected: nn.Module, actual: nn.Module) -> str:
    return difference(dict(expected.named_parameters()), dict(actual.named_parameters()), "parameters") or difference(
        dict(expected.named_buffers()), dict(actual.named_buffers()), "buffers"
    )


def _taken_back(pair: _Pair, outside: dict[str, Any]) -> nn.Module:
    """Go on as if there had been no call: the traced module stopped in the middle of it."""
    set_outer_state(pair.reference, outside)
    _equalize(pair.model, pair.reference)
    return pair.reference


def _equalize(model: nn.Module, reference: nn.Module) -> None:
    """Give `model` the tensors of `reference`, so that one finding does not make all later calls differ."""
    set_outer_state(model, outer_state(reference))
    wanted = dict(_tensors_of(reference))
    with torch.no_grad():
        for name, value in _tensors_of(model):
            if name in wanted and value.shape == wanted[name].shape:
                value.copy_(wanted[name])


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _traced(
    make: Callable[[], nn.Module], library: Library, verdict: Verdict, where: str, case: Case
) -> nn.Module | None:
    seed()
    before = generators()
    try:
        with torch.set_grad_enabled(case.grad):
            return make()
    except library.errors as error:
        verdict.refusals.append(f"{type(error).__name__}: {error}")
    except Exception as error:
        verdict.findings.append(("raw error", where, f"{type(error).__name__}: {error}"))
    finally:
        if before != generators():
            verdict.findings.append(("changed by tracing", where, "random state"))
    return None


# -- extractors --------------------------------------------------------------------------------------------------------


def _judge_extractor(case: Case, library: Library, reference: nn.Module, model: nn.Module, verdict: Verdict) -> None:
    """Compare the values of nodes that are calls of leaf modules with what hooks see, in both modes."""
    assert library.extractor is not None
    assert library.names is not None
    args, kwargs = example(case)
    if args and kwargs:
        return
    outside = outer_state(reference)
    for mode in (True, False):
        if run(copy.deepcopy(reference).train(mode), (args, kwargs), grad=case.grad).error is not None:
            return
    set_outer_state(reference, outside)
    inputs, before, names = (args or kwargs), snapshot(model), library.names
    both = _traced(lambda: names(model, example_inputs=inputs), library, verdict, "names", case)  # type: ignore[arg-type, return-value]
    if both is None:
        return
    wished = [_wished(reference, names, case) for names in both]  # type: ignore[attr-defined]
    if not all(wished):
        return
    extractor = _traced(
        lambda: library.extractor(  # type: ignore[misc]
            model,
            train_return_nodes={name: name for name in wished[0]},
            eval_return_nodes={name: name for name in wished[1]},
            suppress_diff_warning=True,
            example_inputs=inputs,
        ),
        library,
        verdict,
        "extractor",
        case,
    )
    changed = difference(before, snapshot(model), "model")
    if changed:
        verdict.findings.append(("changed by tracing", "extractor", changed))
    if extractor is None:
        return
    verdict.extracted = True
    _judge_alone(case, library, model, extractor, wished, verdict)
    for mode in (case.training, not case.training):
        for label, arguments in calls(case):
            if label in ("same sizes", "other batch", "batch of 1", "negative", "example") and not verdict.is_done:
                where = f"extractor in {'train' if mode else 'eval'} mode, {label}"
                pair = _Pair(reference.train(mode), model, extractor.train(mode))
                reference = _compare_features(where, arguments, case, library, pair, wished[not mode], verdict)


def _judge_alone(
    case: Case, library: Library, model: nn.Module, extractor: nn.Module, wished: list[list[str]], verdict: Verdict
) -> None:
    """Compare the value of one name, asked for alone, with what it is among the others."""
    args, kwargs = example(case)
    train_name, eval_name = (names[case.notes[2] % len(names)] for names in wished)
    alone = _traced(
        lambda: library.extractor(  # type: ignore[misc]
            model,
            train_return_nodes=[train_name],
            eval_return_nodes=[eval_name],
            suppress_diff_warning=True,
            example_inputs=args or kwargs,
        ),
        library,
        verdict,
        "one name",
        case,
    )
    if alone is None or verdict.is_done:
        return
    for mode, name in ((True, train_name), (False, eval_name)):
        outside, outcomes = outer_state(model), []
        for each in (extractor, alone):
            outcomes.append(run(copy.deepcopy(each).train(mode), (args, kwargs), grad=case.grad))
            set_outer_state(model, outside)
        expected, actual = outcomes
        where = f"one name in {'train' if mode else 'eval'} mode"
        if actual.error is not None:
            _note_error(actual.error, where, library, verdict)
        elif expected.error is None:
            what = difference(expected.result[name], actual.result[name], name)
            verdict.findings += [("wrong feature", where, what)] if what else []


def _wished(model: nn.Module, names: Iterable[str], case: Case) -> list[str]:
    """A part of the names, drawn by the case, the names that hooks can check first among them.

    Memory that nothing is written to yet (`torch.empty`) has no value to compare.
    """
    names = [name for name in names if not name.rpartition(".")[2].startswith(("empty", "new_empty"))]
    leaves = [name for name in names if _leaf(model, name) is not None]
    chosen = [name for place, name in enumerate(leaves) if case.notes[place % 6] != 1]
    others = [name for place, name in enumerate(names) if place % 4 == case.notes[0] and name not in leaves]
    return chosen + others[: case.notes[1]]


def _leaf(model: nn.Module, name: str) -> tuple[str, int] | None:
    """The path of a module of torch.nn without children, and which call of it this node is; None for other nodes."""
    path, _, number = name.rpartition("_")
    for candidate, count in ((name, 0), (path, int(number) if number.isdigit() else -1)):
        try:
            module = model.get_submodule(candidate) if candidate and count >= 0 else None
        except AttributeError:
            continue
        # A hook on attention keeps it from its fast path, so that a hook sees other values than without the hook.
        if (
            module is not None
            and type(module).__module__.startswith("torch.nn.modules")
            and not list(module.children())
            and not isinstance(module, (nn.ParameterList, nn.ParameterDict))  # which nobody calls
        ):
            return candidate, count
    return None


def _compare_features(
    where: str, arguments: Arguments, case: Case, library: Library, pair: _Pair, wished: list[str], verdict: Verdict
) -> nn.Module:
    try:
        after = copy.deepcopy(pair.reference)
    except RuntimeError:
        return pair.reference
    seen: dict[str, list[Any]] = {}
    handles = []
    for path in {leaf[0] for leaf in map(functools.partial(_leaf, after), wished) if leaf is not None}:
        hook = lambda module, args, output, path=path: seen.setdefault(path, []).append(copied(output))  # noqa: E731
        handles.append(after.get_submodule(path).register_forward_hook(hook))
    outside = outer_state(pair.reference)
    expected = run(after, arguments, grad=case.grad)
    for handle in handles:
        handle.remove()
    if expected.error is not None:
        set_outer_state(pair.reference, outside)
        return pair.reference
    actual = run(pair.traced, arguments, grad=case.grad)
    if actual.error is not None:
        _note_error(actual.error, where, library, verdict)
        return _taken_back(pair, outside)
    for name in wished:
        leaf = _leaf(after, name)
        if leaf is None:
            continue
        outputs = seen.get(leaf[0], [])
        if leaf[1] >= len(outputs):
            verdict.findings.append(("wrong feature", where, f"{name} is computed, and the model does not"))
            break
        if not isinstance(outputs[leaf[1]], torch.Tensor):
            continue
        what = difference(outputs[leaf[1]], actual.result.get(name), name)
        if what:
            verdict.findings.append(("wrong feature", where, what))
            break
    else:
        verdict.equal.append(where)
    _equalize(pair.model, after)
    return after
