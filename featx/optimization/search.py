"""Search for the recipe with which an extractor is fastest within a tolerance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from featx.errors import ArgumentTypeError, OptimizationError
from featx.examples import Example
from featx.optimization import onednn, openvino_runner
from featx.optimization.build import Builder, Extractor
from featx.optimization.hardware import device_of, digest_of, hardware_of, tensors_of
from featx.optimization.inputs import LONGER, OTHER_FORM, other_forms, validation_inputs
from featx.optimization.measure import relative_errors, time_in_turn, time_once
from featx.optimization.module import OptimizedExtractor, divided, dtypes_of, named
from featx.optimization.plan import Plan, Trial
from featx.optimization.progress import Progress
from featx.optimization.recipe import EXACT_REWRITES, OPENVINO, RECORDED, REWRITES, Recipe
from featx.passes.profile import waiter_for
from featx.tree import tensors_in

# Seconds for which one candidate is timed, and those of the end, together.
_SECONDS, _LAST_SECONDS = 1.5, 5.0
# Where a call takes longer, candidates are timed on fewer rows than the example has, but for the end.
_SECONDS_OF_CALL = 0.3
# What is timed again at the end: so many, and not slower than the best by more than that.
_FINALISTS, _NEAR = 3, 1.1
# What takes so much longer in each of a few calls is not timed further: one call alone may have been interrupted.
_HOPELESS, _CALLS = 2.5, 4
_TOO_SLOW = "not timed: a call takes"
# What gains less than that is noise.
_GAIN = 0.98
# Before anything was compiled, how long that may take, on a GPU too; and how far behind what is compiled may be.
_SECONDS_TO_COMPILE, _SECONDS_TO_COMPILE_ON_GPU, _MAY_WIN_COMPILED = 20.0, 10.0, 1.5
# Compiled code rounds less often: what is off by up to so many tolerances may be within it when it is compiled.
_MAY_FIT_COMPILED = 2.0


class Search:
    """Tries recipes on an extractor.

    Args:
        extractor: in eval mode.
        example: inputs of it, with values.
        called: what these inputs are.
        checks: further inputs on which errors count, by what they are.
        tolerance: the relative error that a feature may have.
        budget: seconds; the last of them are for the final comparison. What has begun is ended.
        int8: also try linear layers in int8.
        progress: shows what is tried.
    """

    def __init__(
        self, extractor: Extractor, example: Example, called: str, checks: dict[str, Example], tolerance: float,
        budget: float, *, int8: bool, progress: Progress,
    ) -> None:  # fmt: skip
        self._extractor = extractor
        self._example = example
        self._tolerance = tolerance
        self._int8 = int8
        self._progress = progress
        self._end = time.perf_counter() + budget - min(_LAST_SECONDS, budget / 4)
        self._wait = waiter_for(tensors_of(extractor))
        # By id, what tensors of inputs were before the first call: a model may write them.
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._called = called
        self._checks = checks
        # By what they are, the inputs on which errors count, and what the exact extractor returns for them.
        self._inputs = {called: example}
        self._expected = {called: self._exact_given("example_inputs", example)}
        self._builder = Builder(extractor, example, dtypes_of(self._expected[called]))
        self._trials: list[Trial] = []
        # The rewrites that change the graph.
        self._effective: tuple[str, ...] = ()
        # The fastest modules within the tolerance, with their trials.
        self._best: list[tuple[Trial, OptimizedExtractor]] = []
        self._seconds_to_compile = _SECONDS_TO_COMPILE_ON_GPU if self._is_on_gpu else _SECONDS_TO_COMPILE

    def _call_on_all_inputs(self) -> None:
        """Find out what the exact extractor returns for all inputs on which errors count."""
        self._add_accepted(validation_inputs(self._example))
        self._add_other_form()
        taken = next((name for name in self._checks if name in self._inputs), None)
        if taken is not None:
            raise ArgumentTypeError(f"checks['{taken}'] has the name of inputs that are checked anyway; choose another")
        for name, each in self._checks.items():
            self._inputs[name], self._expected[name] = each, self._exact_given(f"checks['{name}']", each)

    def _add_accepted(self, inputs: Mapping[str, Example]) -> None:
        """Add the inputs that the exact extractor takes: it may do something else for other values, and refuse."""
        for name, each in inputs.items():
            try:
                expected = self._exact(each)
            except Exception:  # of featx, or of the model
                continue
            self._inputs[name], self._expected[name] = each, expected

    def _add_other_form(self) -> None:
        for each in other_forms(self._example, self._rows) if self._rows else ():
            self._add_accepted({OTHER_FORM: each})
            if OTHER_FORM in self._inputs:
                return

    @property
    def _rows(self) -> int | None:
        """The number of samples in the example; None where its tensors have not all one length."""
        sizes = {len(leaf) if leaf.dim() else 0 for leaf in tensors_in((self._example.args, self._example.kwargs))}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def _one_row(self) -> Example:
        return self._first_rows(1)

    @cached_property
    def _some_rows(self) -> Example:
        """As many rows as a call takes that is not long."""
        return self._first_rows(int((self._rows or 1) * _SECONDS_OF_CALL / self._seconds))

    def _first_rows(self, rows: int) -> Example:
        """Return so many rows of the example, at least one; the whole of it where the extractor takes no fewer."""
        if rows >= (self._rows or 1):
            return self._example
        args, kwargs = divided(self._example.args, self._example.kwargs, max(rows, 1))[0]
        few = replace(self._example, args=args, kwargs=kwargs)
        try:
            self._exact(few)
        except Exception:  # of featx, or of the model
            return self._example
        return few

    def run(self) -> tuple[OptimizedExtractor, Plan]:
        """Try what may help and return the fastest module, with the plan."""
        self._call_on_all_inputs()
        self._seconds = self._check_repeats()
        self._try_rewrites()
        if self._is_on_gpu:
            self._try(replace(self._fastest.recipe, compile=RECORDED))
        if self._tolerance > 0:
            self._try_openvino()
            self._try_formats()
            self._try_rewrites_left_out()
            self._try_compiled()
            self._try_parts()
        return self._chosen()

    # -- what is tried -----------------------------------------------------------------------------------------------

    def _try_rewrites(self) -> None:
        names = tuple(REWRITES) if self._tolerance > 0 else EXACT_REWRITES
        effective = self._effective = self._builder.effective_rewrites(names)
        if self._builder.problem:
            self._trials.append(Trial(Recipe(rewrites=names), problem=self._builder.problem))
        so_far: tuple[str, ...] = ()
        exact = tuple(name for name in effective if name in EXACT_REWRITES)
        for group in (exact, *((name,) for name in effective if name not in EXACT_REWRITES)):
            trial = self._try(Recipe(rewrites=(*so_far, *group))) if group else None
            if trial is not None and trial.recipe == self._fastest.recipe:
                so_far = trial.recipe.rewrites

    def _try_rewrites_left_out(self) -> None:
        """Try rewrites again that gained nothing, in the format that gained: kernels differ in what they take along."""
        for name in self._effective:
            recipe = self._fastest_by_torch.recipe
            if name not in recipe.rewrites:
                rewrites = tuple(each for each in self._effective if each in (*recipe.rewrites, name))
                self._try(replace(recipe, rewrites=rewrites))

    def _try_formats(self) -> None:
        start = self._fastest_by_torch.recipe
        has_maps = any(parameter.dim() == 4 for parameter in self._extractor.parameters())
        if self._is_on_cpu and onednn.is_available() and self._has(nn.Linear):
            self._try(replace(start, onednn=True))
        for dtype in (None, "bfloat16", "float16"):
            for channels_last in (True, False) if has_maps else (False,):
                if dtype is not None:
                    trial = self._try(replace(start, dtype=dtype, channels_last=channels_last))
                    if trial is not None and trial.problem.startswith(_TOO_SLOW):
                        break  # the other layout takes longer still
                elif channels_last:
                    self._try(replace(self._fastest_by_torch.recipe, channels_last=True))
        if self._int8:
            self._try(replace(start, int8=True))

    @property
    def _is_on_cpu(self) -> bool:
        return device_of(self._extractor).type == "cpu"

    @property
    def _is_on_gpu(self) -> bool:
        return device_of(self._extractor).type == "cuda"

    def _has(self, kind: type[nn.Module]) -> bool:
        return any(type(module) is kind for module in self._extractor.modules())

    def _try_openvino(self) -> None:
        if self._is_on_cpu and openvino_runner.is_available():
            self._try(Recipe(rewrites=self._fastest.recipe.rewrites, compile=OPENVINO))

    def _try_compiled(self) -> None:
        # Fused code that is launched one kernel at a time may gain nothing on a GPU where CUDA graphs of it do.
        kinds = ("CUDA graphs", "default") if self._is_on_gpu else ("default", "freezing")
        for recipe in list(self._worth_compiling()):
            # Where the first kind gains nothing, the other one does not either.
            for kind in kinds:
                trial = self._try(replace(recipe, compile=kind))
                if trial is None or trial.ratio is None or trial.ratio > _NEAR * self._ratio:
                    break

    def _worth_compiling(self) -> Iterator[Recipe]:
        """Yield recipes in the order of their promise, the fastest one first; none that OpenVINO is far ahead of."""
        best = self._fastest_by_torch
        if (best.ratio or 1.0) < _MAY_WIN_COMPILED * self._ratio:
            yield best.recipe
        limit = _MAY_FIT_COMPILED * self._tolerance
        others = sorted(
            (trial for trial in self._trials if trial.ratio is not None and trial.error <= limit),
            key=lambda trial: trial.ratio or 0.0,
        )
        for trial in others:
            if (
                trial.recipe != best.recipe
                and trial.ratio is not None
                and trial.ratio < _MAY_WIN_COMPILED * self._ratio
            ):
                yield trial.recipe

    def _try_parts(self) -> None:
        recipe, threads = self._fastest.recipe, torch.get_num_threads()
        if self._is_on_cpu:
            for number in sorted({1, threads // 2} - {0, threads}, reverse=True):
                self._try(replace(recipe, threads=number))
        if size := self._rows:
            for rows in sorted({size // 2, size // 4} - {0, size}, reverse=True):
                self._try(replace(self._fastest.recipe, rows=rows))

    # -- how it is tried ---------------------------------------------------------------------------------------------

    @property
    def _fastest(self) -> Trial:
        return self._best[0][0] if self._best else Trial(Recipe(), 1.0)

    @property
    def _fastest_by_torch(self) -> Trial:
        return next((trial for trial, _ in self._best if trial.recipe.compile != OPENVINO), Trial(Recipe(), 1.0))

    @property
    def _ratio(self) -> float:
        return self._fastest.ratio or 1.0

    def _try(self, recipe: Recipe) -> Trial | None:
        """Try a recipe, unless it was tried; return the trial. What cannot run, or not in time, is noted."""
        if any(trial.recipe == recipe for trial in self._trials):
            return None
        needed = self._seconds_to_compile if recipe.compile not in (None, RECORDED) else 0.0
        if time.perf_counter() + needed > self._end:
            self._trials.append(Trial(recipe, problem="not tried: the budget is used up"))
            return None
        self._progress.show(str(recipe), self._ratio)
        module: OptimizedExtractor | None = None
        try:
            module = self._builder.build(recipe)
            trial = self._measured(recipe, module)
        except Exception as error:  # whatever a backend or the model's code raises in another format
            trial = Trial(recipe, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
        self._trials.append(trial)
        if module is not None and trial.ratio is not None and trial.error <= self._tolerance:
            self._best = sorted([*self._best, (trial, module)], key=lambda pair: pair[0].ratio or 0.0)[:_FINALISTS]
        return trial

    def _measured(self, recipe: Recipe, module: OptimizedExtractor) -> Trial:
        if recipe.compile is None:
            # A CPU without instructions for a dtype takes many times as long, which one row shows.
            inputs = self._some_rows if recipe.dtype is None else self._one_row
            if (once := self._fastest_of_some(module, inputs)) > _HOPELESS:
                return Trial(recipe, problem=f"{_TOO_SLOW} {once:.1f} times as long")
        start = time.perf_counter()
        first = self._call(module, self._example)
        if recipe.compile not in (None, RECORDED):  # which takes a moment
            self._seconds_to_compile = time.perf_counter() - start
        if module.problem:
            return Trial(recipe, problem=module.problem)
        errors = relative_errors(self._expected[self._called], first)
        for name, inputs in self._inputs.items():
            caller = self._caller_of_other_size(module) if name in (LONGER, OTHER_FORM) else module
            found = relative_errors(self._expected[name], self._call(caller, inputs))
            errors = {key: max(error, found[key]) for key, error in errors.items()}
        limit = self._tolerance if recipe.compile is not None else _MAY_FIT_COMPILED * self._tolerance
        if max(errors.values(), default=0.0) > limit:
            return Trial(recipe, None, errors, "not timed: its error is above the tolerance")
        # Some rows tell formats apart as all do, but compiled code is made for one size.
        inputs = self._some_rows if recipe.compile is None and recipe.rows is None else self._example
        times = time_in_turn([self._caller(each, inputs) for each in (self._extractor, module)], _SECONDS, self._wait)
        return Trial(recipe, times[1] / times[0], errors)

    def _caller_of_other_size(self, module: OptimizedExtractor) -> OptimizedExtractor:
        """Return a module that is called for errors at another size, and then dropped."""
        # Code is not compiled for another size, which takes seconds, to measure how it rounds; but OpenVINO has
        # operators of its own.
        return module.compiled_anew() if module.recipe.compile == OPENVINO else module.uncompiled()

    def _fastest_of_some(self, module: nn.Module, inputs: Example) -> float:
        """Return the time of the fastest of a few calls by that of the exact extractor; of one if that is promising."""
        exact, other = self._caller(self._extractor, inputs), self._caller(module, inputs)
        other()  # the first call sets things up
        ratios: list[float] = []
        while len(ratios) < _CALLS and time.perf_counter() < self._end:
            ratios.append(time_once(other, self._wait) / time_once(exact, self._wait))
            if ratios[-1] <= _HOPELESS:
                break
        return min(ratios, default=0.0)

    def _chosen(self) -> tuple[OptimizedExtractor, Plan]:
        """Time the fastest once more, all in turn, and return the one that is."""
        self._progress.show("the fastest once more", self._ratio)
        near = [pair for pair in self._best if (pair[0].ratio or 0.0) <= _NEAR * self._ratio]
        modules = (self._extractor, *[module for _, module in near])
        callers = [self._caller(module, self._example) for module in modules]
        times = time_in_turn(callers, _LAST_SECONDS, self._wait)
        ranked = sorted(zip(times[1:], near, strict=True), key=lambda item: item[0])
        last = {trial.recipe: took / times[0] for took, (trial, _) in ranked}
        self._trials = [replace(each, ratio=last.get(each.recipe, each.ratio)) for each in self._trials]
        chosen, module = Trial(Recipe(), 1.0, dict.fromkeys(self._builder.dtypes, 0.0)), None
        if ranked and ranked[0][0] < _GAIN * times[0]:
            took, (trial, module) = ranked[0]
            chosen = replace(trial, ratio=took / times[0])
        plan = Plan(
            chosen.recipe, tuple(self._trials), chosen, 1000 * times[0], self._tolerance, tuple(self._inputs),
            hardware_of(self._extractor, chosen.recipe), digest_of(self._extractor), self._builder.dtypes,
        )  # fmt: skip
        self._progress.close()
        return module or self._builder.build(chosen.recipe), plan

    def _caller(self, module: nn.Module, inputs: Example) -> Callable[[], Any]:
        return partial(self._call, module, inputs)

    def _exact(self, inputs: Example) -> dict[str, Any]:
        return self._call(self._extractor, inputs)

    def _exact_given(self, argument: str, inputs: Example) -> dict[str, Any]:
        try:
            return self._exact(inputs)
        except Exception as error:  # the model's own too
            raise OptimizationError(
                f"the extractor does not take {argument}: {type(error).__name__}: {error}"
            ) from error

    def _call(self, module: nn.Module, inputs: Example) -> dict[str, Any]:
        leaves = [leaf for leaf in tensors_in((inputs.args, inputs.kwargs)) if not leaf.is_inference()]
        for leaf in leaves:
            if id(leaf) not in self._given:  # else it is copied in each call, which are timed
                self._given[id(leaf)] = leaf, leaf.clone()
        versions = [leaf._version for leaf in leaves]
        with torch.no_grad():
            try:
                return named(module(*inputs.args, **inputs.kwargs))
            finally:
                for leaf, version in zip(leaves, versions, strict=True):
                    if leaf._version != version:
                        leaf.copy_(self._given[id(leaf)][1])

    def _check_repeats(self) -> float:
        """Return the seconds of a call; raise where it gives another value than the first one."""
        start = time.perf_counter()
        again = self._exact(self._example)
        seconds = time.perf_counter() - start
        errors = relative_errors(self._expected[self._called], again)
        differs = [key for key, error in errors.items() if error > 0]
        if differs:
            raise OptimizationError(
                f"a second call of the extractor gives another '{differs[0]}' for the same input, so errors cannot be "
                "measured; switch off what it draws or keeps"
            )
        return seconds
