"""Interrupt traces at places drawn at random, each in a child process, and see what that leaves behind."""

from __future__ import annotations

import copy
import gc
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from untouched_child import ChildError, in_child
from untouched_models import CASES, Case
from untouched_state import Snapshot, tensors_of

import featx

LIMIT = 60.0  # seconds, after which a child counts as one that hangs
CALL, TIMER, EDGE = "call", "timer", "edge"
KINDS = (CALL, TIMER, EDGE)
_EVENTS = {CALL: ("call", "c_call"), EDGE: ("call", "c_call", "c_return")}
# Where a trace sets things up and puts them back.
_EDGE_FILES = ("thread_modes", "pass_through", "caches", "generators", "saved_state", "grad_modes", "autocast")
_EDGE_FUNCTIONS = frozenset({"_restore", "restore", "_prepare_replica", "run_once", "__enter__", "__exit__"})
_EDGE_DEPTH = 4
REACHED, SWALLOWED, LATE = "reached", "swallowed", "late"
_QUIET = {"suppress_diff_warning": True}
_INNERMOST = 8  # frames that are printed of the place at which an interrupt landed


def _names(model: nn.Module, case: Case) -> Any:
    return featx.get_graph_node_names(model, example_inputs=case.images(), **_QUIET)


def _extractor(model: nn.Module, case: Case) -> Any:
    extractor = featx.create_feature_extractor(model, list(case.wanted), example_inputs=case.images(), **_QUIET)
    return _names_of_extractor(extractor)


def _adaptive(model: nn.Module, case: Case) -> Any:
    extractor = featx.create_feature_extractor(
        model, list(case.wanted), example_inputs=case.images(), adaptive=True, **_QUIET
    )
    values = extractor(case.images(case.other_side))
    return [sorted(values), *map(_names_of_extractor, extractor.extractors)]


def _trace(model: nn.Module, case: Case) -> Any:
    return _names_of_graph(featx.trace(model, case.images()).graph)


def _symbolic(model: nn.Module, case: Case) -> Any:
    return _names_of_graph(featx.symbolic_trace(model).graph)


def _names_of_graph(graph: featx.Graph) -> list[str]:
    return [f"{node.name} {node.op} {getattr(node.target, '__name__', node.target)}" for node in graph.nodes]


def _names_of_extractor(extractor: featx.DualGraphModule) -> list[list[str]]:
    return [_names_of_graph(extractor.train_graph), _names_of_graph(extractor.eval_graph)]


# Each returns the names of what it found. The adaptive one runs the model too.
ENTRIES: dict[str, Callable[[nn.Module, Case], Any]] = {
    "names": _names,
    "extractor": _extractor,
    "adaptive and a call": _adaptive,
    "trace": _trace,
    "symbolic": _symbolic,
}
_RUNS_MODEL = frozenset({"adaptive and a call"})


@dataclass
class Result:
    """What one interrupt did.

    Attributes:
        outcome: it reached the caller; Python swallowed it, in a `__del__` or the callback of a weak reference; or it
            came late, when the action was over.
        damage: what is otherwise than before, or else went wrong. Empty is good.
        next_trace: why the next trace failed or gave other names. Empty is good.
        where: the innermost frames at the interrupt.
    """

    outcome: str = REACHED
    damage: list[str] = field(default_factory=list)
    next_trace: str = ""
    where: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Whether something is damaged, or the next trace failed."""
        return bool(self.damage or self.next_trace)


@dataclass
class Tally:
    """The numbers of a row of the table."""

    interrupts: int = 0
    swallowed: int = 0
    damaged: int = 0
    next_failed: int = 0


class Subject:
    """One entry point with one model: what it does undisturbed, and a process to fork from."""

    def __init__(self, entry: str, name: str) -> None:
        self.entry, self.case = entry, CASES[name]
        self.model = self.case.build()
        self.action = lambda model: ENTRIES[entry](model, self.case)
        twin = copy.deepcopy(self.model)
        self.action(self.model)  # loads what is loaded lazily
        self.outcomes: dict[str, Tensor] | None = None
        if entry in _RUNS_MODEL:
            self.model = twin
            self.outcomes = self._outcomes()
        self.expected = json.dumps(self.action(self._spare()))
        spare = self._spare()
        self.calls = _count_calls(lambda: self.action(spare))
        self.edges: list[int] = []
        start = time.perf_counter()
        self.action(self._spare())
        self.seconds = time.perf_counter() - start
        _seed()
        self.snapshot = Snapshot(self.model, self.case.written)
        gc.collect()
        gc.freeze()  # children copy less, and look through fewer objects

    def draw(self, kind: str, numbers: random.Random) -> float:
        """Draw a place: the number of a call, or seconds."""
        if kind == EDGE:
            if not self.edges:
                self.edges = _edges(lambda: self.action(self._spare()))
            return numbers.choice(self.edges)
        return numbers.randint(1, self.calls) if kind == CALL else numbers.uniform(0, self.seconds)

    def interrupt(self, kind: str, at: float) -> Result:
        """Interrupt the action in a child process, and return what the child found."""
        try:
            return Result(**in_child(lambda: asdict(_interrupted(self, kind, at)), LIMIT))
        except ChildError as error:
            return Result(damage=[str(error)])

    def _spare(self) -> nn.Module:
        return copy.deepcopy(self.model) if self.entry in _RUNS_MODEL else self.model

    def _outcomes(self) -> dict[str, Tensor]:
        spare = self._spare()
        _seed()
        self.action(spare)
        return dict(tensors_of(spare))


def run(count: int, seed: int, kinds: Sequence[str], models: Collection[str]) -> Iterator[tuple[str, str, Tally]]:
    """Interrupt `count` times, as often in each entry point and kind, and yield the rows of the table.

    What is wrong is printed as it is found, to standard error. Interrupts that come late are drawn again.
    """
    for number, entry in enumerate(ENTRIES):
        names = [name for name in models if CASES[name].is_symbolic or entry != "symbolic"]
        tallies = {kind: Tally() for kind in kinds}
        for index, name in enumerate(names):
            subject = Subject(entry, name)
            for position, kind in enumerate(kinds):
                share = _part(_part(count, len(ENTRIES), number), len(kinds), position)
                _interrupt_often(subject, kind, _part(share, len(names), index), seed, tallies[kind])
        for kind, tally in tallies.items():
            yield entry, kind, tally


def repeat(entry: str, name: str, kind: str, at: float) -> Result:
    """Do again what was printed for an interrupt."""
    return Subject(entry, name).interrupt(kind, at)


def _part(total: int, parts: int, index: int) -> int:
    return total * (index + 1) // parts - total * index // parts


def _interrupt_often(subject: Subject, kind: str, count: int, seed: int, tally: Tally) -> None:
    numbers = random.Random(f"{seed} {subject.entry} {subject.case.name} {kind}")
    places: Counter[str] = Counter()
    done = 0
    while done < count:
        at = subject.draw(kind, numbers)
        result = subject.interrupt(kind, at)
        if result.outcome == LATE and not result.damage:
            continue
        done += 1
        tally.interrupts += 1
        tally.swallowed += result.outcome == SWALLOWED
        tally.damaged += bool(result.damage)
        tally.next_failed += bool(result.next_trace)
        places.update(result.where[-1:])
        if result.is_bad or result.outcome == SWALLOWED:
            _print_finding(subject, kind, at, seed, result)
    print(
        f"{subject.entry}, {subject.case.name}, {kind}: {done} done, {len(places)} places", file=sys.stderr, flush=True
    )


def _print_finding(subject: Subject, kind: str, at: float, seed: int, result: Result) -> None:
    what = "damage" if result.is_bad else result.outcome
    print(f'\n{what} (seed {seed}): --repeat "{subject.entry}" {subject.case.name} {kind} {at}', file=sys.stderr)
    for line in (*result.damage[:20], result.next_trace, *result.where):
        if line:
            print(f"    {line}", file=sys.stderr, flush=True)


# -- in the child ----------------------------------------------------------------------------------------------------


class _Landing:
    """Raises one KeyboardInterrupt, notes where, and hears whether Python swallowed it."""

    def __init__(self) -> None:
        self.where: list[str] = []
        self.has_landed = self.is_over = self.is_unraisable = False

    def raise_at(self, frame: FrameType | None) -> None:
        self.has_landed = True
        while frame is not None:
            self.where.insert(0, f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        del self.where[:-_INNERMOST]
        raise KeyboardInterrupt

    def on_unraisable(self, event: Any) -> None:
        self.is_unraisable = self.is_unraisable or issubclass(event.exc_type, KeyboardInterrupt)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.is_over:
            self.raise_at(frame)


def _seed() -> None:
    random.seed(1)  # Python seeds it anew in a child
    torch.manual_seed(1)


def _interrupted(subject: Subject, kind: str, at: float) -> Result:
    landing, result = _Landing(), Result()
    _seed()
    hook, sys.unraisablehook = sys.unraisablehook, landing.on_unraisable
    signal.signal(signal.SIGALRM, landing.on_signal)
    try:
        if kind == TIMER:
            signal.setitimer(signal.ITIMER_REAL, max(at, 1e-6))
        else:
            _arm_call(landing, kind, at)
        subject.action(subject.model)
        landing.is_over = True
    except KeyboardInterrupt:
        landing.is_over = True
    except BaseException as error:
        landing.is_over = True
        result.damage.append(f"the caller got {type(error).__name__}: {error}")
    else:
        if not landing.has_landed:
            result.outcome = LATE
        elif landing.is_unraisable:
            result.outcome = SWALLOWED
        else:
            result.damage.append("the interrupt was lost")
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.unraisablehook = hook
    result.where = landing.where
    if not result.damage and result.outcome == LATE:
        return result
    result.damage += subject.snapshot.differences(subject.outcomes)
    try:
        found = json.dumps(subject.action(subject.model))
        if found != subject.expected:
            result.next_trace = "the next trace gave other names"
    except BaseException as error:
        result.next_trace = f"the next trace raised {type(error).__name__}: {error}"
    if subject.outcomes is None and not result.damage:
        result.damage += [f"after the next trace: {each}" for each in subject.snapshot.differences()]
    return result


def _arm_call(landing: _Landing, kind: str, at: float) -> None:
    number, counted = 0, _EVENTS[kind]

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in counted
        if number == at and not landing.has_landed:
            landing.raise_at(frame)

    sys.setprofile(on_event)


def _watch(action: Callable[[], object], on_event: Callable[[FrameType, str, object], None]) -> None:
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(None)


def _count_calls(action: Callable[[], object]) -> int:
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in _EVENTS[CALL]

    _watch(action, count)
    return number


def _edges(action: Callable[[], object]) -> list[int]:
    """Return the numbers of those calls and returns that are made where a trace sets up or puts back."""
    number = 0
    found: list[int] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in _EVENTS[EDGE]
        if event in _EVENTS[EDGE] and _is_edge(frame):
            found.append(number)

    _watch(action, note)
    return found


def _is_edge(frame: FrameType | None) -> bool:
    for _ in range(_EDGE_DEPTH):
        if frame is None:
            break
        file = frame.f_code.co_filename
        is_in_file = "/featx/" in file and file.rpartition("/")[2].removesuffix(".py") in _EDGE_FILES
        if is_in_file or frame.f_code.co_name in _EDGE_FUNCTIONS:
            return True
        frame = frame.f_back
    return False
