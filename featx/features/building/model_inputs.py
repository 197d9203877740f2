"""The inputs on which a model is traced: those that the caller gives, or guessed ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from featx.examples import Example, find_example, holds_inputs
from featx.features.describing.images import ImageInput, images_of
from featx.ir.paths import module_at
from featx.libraries import MASK_OF_PADDING
from featx.tracing.inputs.given_example import given_example
from featx.tracing.symbolic.inputs import PHBase
from featx.tree import tensors_in, tree_leaves


class ModelInputs:
    """The inputs on which one model is traced.

    Attributes:
        given: those that the caller gives; None where there are none.
        guessed: those that were guessed last, from what the model declares or from its first layer.
        fixed: inputs with one value in every call, by name, as the caller gives them in `concrete_args`.
        missing: why a trace had to do without inputs, so that its values have no shapes; None if none had.
    """

    def __init__(self, model: nn.Module, example_inputs: Any, concrete_args: dict[str, Any] | None) -> None:
        self._model = model
        self.given = None if example_inputs is None else given_example(model, example_inputs)
        # A list that was taken for several inputs, and may be meant as one.
        is_one_input = self.given is None or any(each is example_inputs for each in self.given.args)
        self._is_list_of_inputs = type(example_inputs) is list and not is_one_input
        self.guessed: Example | None = None
        self.fixed = concrete_args
        self.missing: str | None = None

    @property
    def used(self) -> Example | None:
        """The inputs that were followed; None after a symbolic trace."""
        return self.given or self.guessed

    @property
    def names(self) -> list[str]:
        """The names of the inputs that every call of the model has to give."""
        parameters = inspect.signature(self._model.forward).parameters.values()
        fixed = self.fixed or {}
        return [each.name for each in parameters if each.default is each.empty and each.name not in fixed]

    @property
    def is_for_one_mode(self) -> bool:
        """Whether the model was traced on guessed inputs that it takes in one of train and eval mode only."""
        return self.guessed is not None and self.guessed.is_for_one_mode

    @property
    def image(self) -> ImageInput | None:
        """The first input that is an image, a video or a signal; None where there is none."""
        return next(iter(self.images), None)

    @property
    def images(self) -> list[ImageInput]:
        """The inputs that are images, videos or signals, the first one first."""
        return [] if self.used is None else images_of(self.used, inspect.signature(self._model.forward))

    def find(self, training: bool, *, starts_inside: bool) -> Example | None:
        """Return the inputs for a trace in a mode, with the fixed ones among them; None where none can be guessed.

        `starts_inside` says that the graph will not begin at the inputs of the model.
        """
        example = self.given or self._guess(training, starts_inside)
        if example is None or not self.fixed:
            return example
        # PH says that an input is not fixed.
        fixed = {name: value for name, value in self.fixed.items() if not _has_placeholder(value)}
        return Example(example.args, {**example.kwargs, **fixed}, example.source)

    def _guess(self, training: bool, starts_inside: bool) -> Example | None:
        if self.guessed is None or self.is_for_one_mode:
            self.guessed = find_example(self._model, training)
            if self.guessed is not None and starts_inside:
                # A mask decides by its values, and a graph that begins after it has none.
                self.guessed = self.guessed.without(MASK_OF_PADDING, self._model.forward)
        return self.guessed

    def names_left_out(self) -> list[str]:
        """Return the inputs that are None where the caller gives none, as forward has it."""
        fixed = self.fixed or {}
        parameters = inspect.signature(self._model.forward).parameters.values()
        return [each.name for each in parameters if each.default is None and each.name not in fixed]

    def describe(self, example: Example) -> str:
        """Say which inputs these are, for the error of a name."""
        return "these inputs" if example is self.given else f"inputs guessed from {example.source}"

    def note_on(self, error: Exception, example: Example, asked: Iterable[str]) -> None:
        """Add to an error of the model on which inputs it was raised, and what else gives the nodes that are asked for.

        A model of several towers runs with the inputs of all of them, and a tower with its own.
        """
        tensors = tensors_in((example.args, example.kwargs))
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors) or "none"
        name = type(self._model).__name__
        error.add_note(f"{name} raised this on example_inputs, whose tensors have the shapes {shapes}")
        if self._is_list_of_inputs:
            error.add_note("A list is taken for the inputs of forward, one after the other; for one list: ([a, b],)")
        for each in example.args:
            if isinstance(each, Mapping) and holds_inputs(self._model, each):
                error.add_note(f"A {type(each).__name__} has inputs by name; pass it with two stars: **inputs")
        tower = self._tower_that_takes(example, asked)
        if tower is not None:
            error.add_note(
                f"All that is asked for lies in '{tower}', which takes these inputs; if forward needs others, make the "
                f"extractor of model.{tower}"
            )

    def _tower_that_takes(self, example: Example, asked: Iterable[str]) -> str | None:
        """Return the child in which all these nodes lie, if its forward has inputs of these names."""
        children = {name.partition(".")[0] for name in asked}
        child = module_at(self._model, next(iter(children))) if len(children) == 1 else None
        if child is None or example.args or not example.kwargs:
            return None
        takes = inspect.signature(child.forward).parameters.keys()
        return next(iter(children)) if example.kwargs.keys() <= takes else None

    def note_failure(self, example: Example, error: Exception) -> None:
        """Take note that the model is traced without inputs, as it fails on guessed ones."""
        reason = " ".join(str(error).split())
        self.missing = f"it fails on inputs guessed from {example.source} ({type(error).__name__}: {reason:.200})"


def _has_placeholder(value: Any) -> bool:
    return any(isinstance(leaf, PHBase) for leaf in tree_leaves(value))
