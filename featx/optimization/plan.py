"""Plan: what was tried to make an extractor faster, what it gained and lost, and what was chosen."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from featx.checksums import with_checksum, without_checksum
from featx.errors import OptimizationError
from featx.optimization.hardware import digest_of, hardware_of
from featx.optimization.recipe import Recipe
from featx.plotting import new_figure

_VERSION = 2


@dataclass(frozen=True)
class Trial:
    """One recipe that was tried.

    Attributes:
        recipe: what was done.
        ratio: the time of a call by that of the exact extractor, measured in turn; None where it was not timed.
        errors: the largest relative error of each feature, over all inputs; empty where it could not run.
        problem: why it could not run, or was not timed.
    """

    recipe: Recipe
    ratio: float | None = None
    errors: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    problem: str = ""

    @property
    def error(self) -> float:
        """The largest error of a feature."""
        return max(self.errors.values(), default=math.inf if self.problem else 0.0)


@dataclass(frozen=True)
class Plan:
    """What was tried, and the recipe that was chosen. `print(plan)` shows it as a table.

    Attributes:
        recipe: what makes the extractor fastest within the tolerance.
        trials: everything that was tried, in order.
        chosen: the times and errors of `recipe`, measured once more at the end.
        milliseconds: what a call of the exact extractor takes for the example.
        tolerance: the relative error that a feature may have.
        inputs: what errors were measured on.
        hardware: where it was measured.
        digest: a hash of the extractor's code and of the shapes of its weights.
        dtypes: the dtypes of the tensors in each feature.
    """

    recipe: Recipe
    trials: tuple[Trial, ...]
    chosen: Trial
    milliseconds: float
    tolerance: float
    inputs: tuple[str, ...]
    hardware: dict[str, str]
    digest: str
    dtypes: dict[str, list[str]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, which `load` reads.

        Raises:
            OptimizationError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")
        except OSError as error:
            raise OptimizationError(f"the plan cannot be written to '{path}': {error.strerror}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON can hold it, with a checksum."""
        content = {
            **vars(self),
            "version": _VERSION,
            "recipe": self.recipe.to_json(),
            "chosen": _trial_to_json(self.chosen),
            "trials": [_trial_to_json(trial) for trial in self.trials],
        }
        return with_checksum(content)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` has written.

        Raises:
            OptimizationError: the file is no such plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptimizationError(f"the plan '{path}' cannot be read: {error}; Plan.save writes one") from error
        try:
            return Plan.from_json(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OptimizationError(f"'{path}' is no plan of featx.optimize ({error!r}); optimize anew") from error

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """Return what `to_json` has given.

        Raises:
            OptimizationError: it is of another version, or has been changed. What is no plan at all raises errors of
                any kind.
        """
        if value["version"] != _VERSION:
            raise OptimizationError(f"a plan of version {value['version']!r}, and this is {_VERSION}; optimize anew")
        fields = without_checksum(value)
        if fields is None:
            raise OptimizationError("the plan is not as it was measured: it has been edited, or damaged; optimize anew")
        del fields["version"]
        fields["recipe"] = Recipe.from_json(fields["recipe"])
        fields["chosen"] = _trial_from_json(fields["chosen"])
        fields["trials"] = tuple(map(_trial_from_json, fields["trials"]))
        fields["inputs"] = tuple(fields["inputs"])
        return Plan(**fields)

    def check(self, extractor: nn.Module) -> None:
        """Raise unless the plan was made for this extractor on this hardware.

        Raises:
            OptimizationError: it was not; the message says what differs.
            MissingExtraError: it uses OpenVINO, which is not installed.
        """
        here = hardware_of(extractor, self.recipe)
        for name in (*here, *(set(self.hardware) - set(here))):
            if here.get(name) != self.hardware.get(name):
                raise OptimizationError(
                    f"the plan was made for other hardware: {name} was {self.hardware.get(name)!r}, and is "
                    f"{here.get(name)!r}; optimize anew, without a plan"
                )
        if digest_of(extractor) != self.digest:
            raise OptimizationError(
                "the plan was made for another extractor: its code, or the shapes of its weights, differ; optimize anew"
            )

    def __str__(self) -> str:
        heads = ("", "time", "largest error", "")
        rows = [("the exact extractor", "1.00", "0", f"{self.milliseconds:.1f} ms")]
        rows += [self._row(trial) for trial in sorted(self.trials, key=_by_time)]
        result = [
            f"chosen: {self.recipe}, {self.chosen.ratio or 1.0:.2f} of the time, largest error {self.chosen.error:.1e}",
            f"tolerance {self.tolerance:g}, measured on {', '.join(self.inputs)}",
            "",
            *_table([heads, *rows]),
        ]
        return "\n".join(result)

    def _row(self, trial: Trial) -> tuple[str, str, str, str]:
        ratio = "-" if trial.ratio is None else f"{trial.ratio:.2f}"
        error = "-" if math.isinf(trial.error) and trial.problem else f"{trial.error:.1e}"
        note = trial.problem or ("chosen" if trial.recipe == self.recipe else "")
        return str(trial.recipe), ratio, error, note

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:  # Any: a matplotlib Figure
        """Draw error over time, a point for each trial that was timed; write it to a file if `path` is given.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure = new_figure(figsize=(8, 5))
        axes = figure.subplots()
        for trial in self.trials:
            if trial.ratio is not None:
                is_chosen = trial.recipe == self.recipe
                axes.plot(trial.ratio, max(trial.error, 1e-9), "o", color="tab:red" if is_chosen else "tab:blue")
                axes.annotate(
                    str(trial.recipe), (trial.ratio, max(trial.error, 1e-9)), (4, 4), textcoords="offset points",
                    fontsize=7,
                )  # fmt: skip
        if self.tolerance > 0:
            axes.axhline(self.tolerance, color="0.5", linestyle="--", label="tolerance")
        axes.axvline(1.0, color="0.8")
        axes.set(yscale="log", xlabel="time of a call / that of the exact extractor", ylabel="largest relative error")
        if path is not None:
            figure.savefig(path)
        return figure


def _by_time(trial: Trial) -> float:
    return math.inf if trial.ratio is None else trial.ratio


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _trial_to_json(trial: Trial) -> dict[str, Any]:
    errors = {key: error if math.isfinite(error) else None for key, error in trial.errors.items()}
    return {**vars(trial), "recipe": trial.recipe.to_json(), "errors": errors}


def _trial_from_json(value: dict[str, Any]) -> Trial:
    errors = {key: math.inf if error is None else error for key, error in value["errors"].items()}
    return Trial(Recipe.from_json(value["recipe"]), value["ratio"], errors, value["problem"])
