"""Let eight threads trace a model while two others run and train it, and compare with the same two alone."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from untouched_child import ChildError, in_child
from untouched_models import CASES, Case
from untouched_state import bytes_of

import featx

TRACERS = 8
STEPS = 4  # of training, at least; it goes on for as long as the others trace
LIMIT = 600.0  # seconds, after which a run counts as one that hangs
_SWITCH = 1e-5  # seconds between switches of threads; Python's own is 5e-3
_SEED = 3
_SHOWN = 5  # differences that are printed
_LINE = 400  # characters of what is wrong
_SEEDED = 3  # steps of training between seeds


@dataclass
class Run:
    """What one run found.

    Attributes:
        differences: what is otherwise than where nobody traces. Empty is good.
        wrong: what the threads that trace got and should not have. Empty is good.
        steps: how often the model was trained, and run between.
        traces: how many traces were made.
        disturbed: how many were given up because other threads ran, with a `TraceError` that says so.
    """

    differences: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    steps: int = 0
    traces: int = 0
    disturbed: int = 0


@dataclass
class Tally:
    """The numbers of a row of the table."""

    runs: int = 0
    equal: int = 0
    differing: int = 0
    steps: int = 0
    traces: int = 0
    wrong: int = 0
    disturbed: int = 0


def run(count: int, seed: int, names: Sequence[str], seeds: bool) -> Iterator[tuple[str, Tally]]:
    """Do `count` runs, model by model, and yield the rows of the table. What is wrong goes to standard error."""
    for index, name in enumerate(names):
        tally = Tally()
        subject = _Subject(CASES[name])
        for number in range(count * index // len(names), count * (index + 1) // len(names)):
            try:
                found = Run(**in_child(lambda: asdict(subject.run(seed + number, seeds)), LIMIT))  # noqa: B023
            except ChildError as error:
                found = Run(differences=[str(error)])
            _add(tally, found)
            _print_finding(name, seed + number, found)
        yield name, tally


def _print_finding(name: str, seed: int, found: Run) -> None:
    repeat = f"--what threads --models {name} --count 1 --seed {seed}"
    print(f"{repeat}: {len(found.differences)} differences, {len(found.wrong)} wrong", file=sys.stderr, flush=True)
    for line in (*found.differences[:_SHOWN], *found.wrong):
        print(f"    {line[:_LINE]}", file=sys.stderr, flush=True)


def _add(tally: Tally, found: Run) -> None:
    tally.runs += 1
    tally.equal += not found.differences
    tally.differing += bool(found.differences)
    tally.steps += found.steps
    tally.traces += found.traces
    tally.wrong += len(found.wrong)
    tally.disturbed += found.disturbed


class _Subject:
    """A model, and what its traces give where no other thread runs."""

    def __init__(self, case: Case) -> None:
        self.case = case
        model = case.build()
        self.entries = _entries(case)
        self.names = {name: _names_in(entry(model)) for name, entry in self.entries.items()}
        torch.optim.SGD(model.parameters(), lr=0.01)  # loads what is loaded lazily
        gc.collect()
        gc.freeze()

    def run(self, seed: int, seeds: bool) -> Run:
        """Train and run a model in two threads while eight trace it, then a copy of it alone, and compare.

        With an odd seed the thread that runs the model puts it into eval mode each time, and back.
        """
        way = _Way(bool(seed % 2), seeds)
        sys.setswitchinterval(_SWITCH)
        result = Run()
        model = self.case.build()
        alone = copy.deepcopy(model)
        attributes = _attributes(model, self.case)
        flags = [module.training for module in model.modules()]
        tracers = _Tracers(model, self.entries, seed)
        together = _together(model, self.case, way, tracers)
        result.steps = len(together.losses)
        expected = _alone(alone, self.case, way, result.steps)

        result.differences += together.differences(expected)
        result.differences += _differences(model, alone, self.case)
        if [(label, id(value)) for label, value in _attributes(model, self.case)] != [
            (label, id(value)) for label, value in attributes
        ]:
            result.differences.append("attributes are other objects")
        if [module.training for module in model.modules()] != flags:
            result.differences.append("other flags")
        for name, error in tracers.errors:
            if isinstance(error, featx.TraceError) and "other threads" in str(error):
                result.disturbed += 1
            else:
                result.wrong.append(f"{name}: {type(error).__name__}: {error}, at {_place_of(error)}")
        result.traces = len(tracers.products) + len(tracers.errors)
        result.wrong += self._wrong(tracers.products, model, way)
        return result

    def _wrong(self, products: list[tuple[str, Any]], model: nn.Module, way: _Way) -> list[str]:
        """Return what is wrong with what the threads got, now that the weights stay as they are.

        A single trace is one in the modes in which the model was, and is looked at where these did not switch.
        """
        of_modes = [(name, product) for name, product in products if name in ("trace", "symbolic")]
        others = [(name, product) for name, product in products if name not in ("trace", "symbolic")]
        found = [
            f"{name}: other names, {set(_flat(_names_in(product))) ^ set(_flat(self.names[name]))}"
            for name, product in (others if way.switches else products)
            if _names_in(product) != self.names[name]
        ]
        sides = (self.case.side, self.case.other_side)
        model.eval()
        expected = {side: _by_hooks(model, self.case, self.case.images(side)) for side in sides}
        for name, product in others:
            for side in () if name == "names" else sides if name == "adaptive" else sides[:1]:
                features = _attempted(product.eval(), self.case.images(side))
                if not isinstance(features, dict) or not _is_equal(features, expected[side]):
                    found.append(f"{name} at {side}: other values, {_short(features)}")
        for name, product in () if way.switches else of_modes:
            outputs: list[Any] = []
            for each in (model, product):  # in train mode, so that statistics do not count
                torch.manual_seed(_SEED)
                outputs.append(_attempted(each.train(), self.case.images()))
            if not isinstance(outputs[1], Tensor) or not torch.equal(*outputs):
                found.append(f"{name}: other values, {_short(outputs[1])}")
        return found


def _attempted(module: nn.Module, images: Tensor) -> Any:
    """Return what a module gives, or the error that it raises."""
    try:
        with torch.no_grad():
            return module(images)
    except featx.FeatxError as error:
        return error


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value}"[:_LINE] if isinstance(value, Exception) else type(value).__name__


def _entries(case: Case) -> dict[str, Callable[[nn.Module], Any]]:
    options: dict[str, Any] = {"example_inputs": case.images(), "suppress_diff_warning": True}
    wanted = list(case.wanted)
    entries = {
        "names": lambda model: featx.get_graph_node_names(model, **options),
        "extractor": lambda model: featx.create_feature_extractor(model, wanted, **options),
        "adaptive": lambda model: featx.create_feature_extractor(model, wanted, adaptive=True, **options),
        "trace": lambda model: featx.trace(model, options["example_inputs"]),
        "symbolic": lambda model: featx.symbolic_trace(model),
    }
    if not case.is_symbolic:
        del entries["symbolic"]
    return entries


def _place_of(error: BaseException) -> str:
    """Return the innermost lines of an error, and of what it was raised from."""
    frames = [
        frame for each in (error, error.__cause__) if each for frame in traceback.extract_tb(each.__traceback__)[-4:]
    ]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))


def _flat(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [name for each in names for name in _flat(each)]


def _names_in(product: Any) -> Any:
    if isinstance(product, featx.AdaptiveExtractor):
        return [_names_in(extractor) for extractor in product.extractors]
    if isinstance(product, featx.DualGraphModule):
        return [[node.name for node in graph.nodes] for graph in (product.train_graph, product.eval_graph)]
    return [node.name for node in product.graph.nodes] if isinstance(product, featx.GraphModule) else product


class _Tracers:
    """Threads that each trace a model by all entry points, in an order of their own."""

    def __init__(self, model: nn.Module, entries: dict[str, Callable[[nn.Module], Any]], seed: int) -> None:
        self.products: list[tuple[str, Any]] = []
        self.errors: list[tuple[str, BaseException]] = []
        self._model, self._entries = model, entries
        self._start = threading.Barrier(TRACERS + 1)
        orders = [random.Random(f"{seed} {number}").sample(list(entries), len(entries)) for number in range(TRACERS)]
        self._threads = [threading.Thread(target=self._work, args=(order,)) for order in orders]

    def start(self) -> None:
        """Start all of them at one moment."""
        for thread in self._threads:
            thread.start()
        self._start.wait()

    def are_done(self) -> bool:
        """Say whether all have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, order: list[str]) -> None:
        self._start.wait()
        for name in order:
            try:
                self.products.append((name, self._entries[name](self._model)))
            except BaseException as error:
                self.errors.append((name, error))


@dataclass(frozen=True)
class _Way:
    """How a model is run and trained: whether modes are switched between, and the generator is seeded anew."""

    switches: bool
    seeds: bool


@dataclass
class _History:
    """What the two threads that train and run a model saw."""

    losses: list[float] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    generator: bytes = b""

    def differences(self, other: _History) -> list[str]:
        found = [f"loss {n}" for n, (one, two) in enumerate(zip(self.losses, other.losses, strict=True)) if one != two]
        pairs = zip(self.outputs, other.outputs, strict=True)
        found += [f"output {number}" for number, (one, two) in enumerate(pairs) if one != two]
        return found + ["generator"] * (self.generator != other.generator)


class _Work:
    """The steps of training a model, and the runs between them."""

    def __init__(self, model: nn.Module, case: Case, way: _Way) -> None:
        self._model, self._images, self._way = model, case.images(), way
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.history = _History()
        torch.manual_seed(_SEED)  # the default generator, from which dropout draws

    def train(self) -> None:
        """Train one step, in the modes in which the model is."""
        if self._way.seeds and len(self.history.losses) % _SEEDED == 0:
            torch.manual_seed(len(self.history.losses))
        loss = self._model(self._images).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.history.losses.append(loss.item())

    def run(self) -> None:
        """Run the model, in eval mode if this switches modes, which are put back."""
        flags = [(module, module.training) for module in self._model.modules()] if self._way.switches else []
        if self._way.switches:
            self._model.eval()
        with torch.no_grad():
            self.history.outputs.append(bytes_of(self._model(self._images)))
        for module, training in flags:
            module.training = training

    def end(self) -> _History:
        """Return what was seen."""
        self.history.generator = torch.get_rng_state().numpy().tobytes()
        return self.history


def _alone(model: nn.Module, case: Case, way: _Way, steps: int) -> _History:
    work = _Work(model, case, way)
    for _ in range(steps):
        work.train()
        work.run()
    return work.end()


def _together(model: nn.Module, case: Case, way: _Way, tracers: _Tracers) -> _History:
    """Train and run a model in two threads, by turns, until the others have traced it."""
    work = _Work(model, case, way)
    turns = threading.Semaphore(1), threading.Semaphore(0)
    errors: list[BaseException] = []
    is_over = False

    def train() -> None:
        nonlocal is_over
        for step in itertools.count():
            turns[0].acquire()
            is_over = bool(errors) or (step >= STEPS and tracers.are_done())
            if not is_over:
                _attempt(work.train, errors)
            turns[1].release()
            if is_over:
                return

    def run_model() -> None:
        while True:
            turns[1].acquire()
            if is_over:
                return
            _attempt(work.run, errors)
            turns[0].release()

    both = [threading.Thread(target=target) for target in (train, run_model)]
    tracers.start()
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    if errors:
        raise errors[0]
    return work.end()


def _attempt(action: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        action()
    except BaseException as error:
        errors.append(error)


def _attributes(model: nn.Module, case: Case) -> list[tuple[str, Any]]:
    """Return what the modules hold, and what their dicts hold, without what their own forward assigns."""
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in case.written and name != "training":
                found.append((f"{path}.{name}", value))
                if isinstance(value, dict):
                    found += [(f"{path}.{name}.{key}", inner) for key, inner in value.items()]
    return found


def _differences(model: nn.Module, alone: nn.Module, case: Case) -> list[str]:
    """Return in what a model is not bit for bit one that was trained alone."""
    found: list[str] = []
    tensors, expected = model.state_dict(), alone.state_dict()
    found += ["keys of the state dict"] * (list(tensors) != list(expected))
    found += [name for name in expected if bytes_of(tensors[name]) != bytes_of(expected[name])]
    for (path, module), (_, twin) in zip(model.named_modules(), alone.named_modules(), strict=True):
        if list(vars(module)) != list(vars(twin)):
            found.append(f"attributes of '{path}'")
        found += [f"{path}.{name}" for name in case.written if vars(module).get(name) != vars(twin).get(name)]
    for (name, one), (_, two) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        if (one.grad is None) != (two.grad is None) or (one.grad is not None and not torch.equal(one.grad, two.grad)):
            found.append(f"gradient of {name}")
    return found


def _by_hooks(model: nn.Module, case: Case, images: Tensor) -> dict[str, Tensor]:
    features: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, path=path: features.update({path: output.clone()})
        )
        for path in case.wanted
    ]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return features


def _is_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
