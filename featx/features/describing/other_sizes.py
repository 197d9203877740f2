"""What becomes of values where the inputs have another size, to tell what their dimensions mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn

from featx.examples import Example
from featx.features.describing.images import ImageInput, is_of_places
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.module import GraphModule
from featx.passes.shapes import ShapeProp
from featx.tracing.replica.replica import Replica
from featx.tree import tensors_in, tree_map

# The shapes that a graph returns, by key.
Shapes = Mapping[str, tuple[int, ...]]
# Cached properties that hold what runs have found.
_FOUND = ("_wider", "_three_times_as_many_and_longer", "_more_samples", "_longer")
# From the shape of an input, another one.
_Resize = Callable[[torch.Tensor], list[int]]


class OtherSizes:
    """Runs a graph on tensors without values that have other sizes, when it is asked for the first time.

    Args:
        graph: makes a graph of `model` that returns a dict of the values.
        model: has the modules that it calls.
        example: the inputs that were followed.
        image: the one that is an image; None where there is none.
    """

    def __init__(
        self, graph: Callable[[], Graph], model: nn.Module, example: Example, image: ImageInput | None
    ) -> None:
        self._graph = graph
        self._model = model
        self._example = example
        self._image = image
        self._larger: dict[tuple[int, ...], Shapes] = {}
        self._inputs = [leaf for leaf in tensors_in((example.args, example.kwargs)) if leaf.dim()]

    def take_over(self, earlier: OtherSizes) -> None:
        """Take over what `earlier` has found with an equal graph, in runs that came to their end."""
        self._larger = earlier._larger.copy()
        found = vars(earlier)
        for name in _FOUND:
            if name in found and (name != "_wider" or found[name][1]):
                vars(self)[name] = found[name]

    def of_image(self, image: ImageInput | None) -> OtherSizes:
        """Return the same for another image among the inputs."""
        return self if image == self._image else OtherSizes(self._graph, self._model, self._example, image)

    @property
    def batch(self) -> int | None:
        """The first length of the first input."""
        return self._inputs[0].shape[0] if self._inputs else None

    def turns(self, shape: tuple[int, ...]) -> bool:
        """Say whether the first two dimensions of a value are those of the first input in the other order."""
        first = tuple(self._inputs[0].shape[:2]) if self._inputs else ()
        return len(first) == 2 and first[0] != first[1] and shape[:2] == first[::-1]

    @property
    def of_example(self) -> Shapes:
        """The shapes for the example itself, as far as the graph runs without values."""
        return self._shapes(lambda value: list(value.shape), has_guards=False)[0]

    @property
    def wider(self) -> Shapes:
        """The shapes for an image of twice the width; nothing where the graph does not take one."""
        shapes, is_whole = self._wider
        return shapes if is_whole else {}

    @property
    def wider_so_far(self) -> Shapes:
        """The same; where the graph does not take one, of the values before the node that refuses it."""
        return self._wider[0]

    @cached_property
    def _wider(self) -> tuple[Shapes, bool]:
        return self._of_image(lambda sides: [*sides[:-1], 2 * sides[-1]])

    def larger_so_far(self, more: tuple[int, ...]) -> Shapes:
        """The shapes for an image whose sides have so many pixels more, of the values before what refuses it."""
        if more not in self._larger:
            found, _ = self._of_image(lambda sides: [side + by for side, by in zip(sides, more, strict=True)])
            self._larger[more] = found
        return self._larger[more]

    def _of_image(self, resize: Callable[[list[int]], list[int]]) -> tuple[Shapes, bool]:
        image = self._image

        def resized(value: torch.Tensor) -> list[int]:
            shape = list(value.shape)
            is_image = image is not None and is_of_places(value) and tuple(shape[2:]) == image.sizes
            return [*shape[:2], *resize(shape[2:])] if is_image else shape

        return self._shapes(resized)

    def layout_of_sequence(self, key: str, shape: tuple[int, ...]) -> str | None:
        """Return the layout of a value of three dimensions, of which L are the places of a text or a signal.

        None where its dimensions change in another way, and where the graph takes no other sizes.
        """
        there = self._three_times_as_many_and_longer.get(key, ())
        changed = [dim for dim, now in enumerate(there) if len(there) == len(shape) and now != shape[dim]]
        samples = {dim for dim in changed if there[dim] == 3 * shape[dim]}
        places = {*changed} - samples
        if len(samples) != 1 or len(places) != 1:  # one run does not tell, and two may
            samples = self._changed(key, shape, [self._more_samples])
            places = self._changed(key, shape, self._longer)
        if len(samples) != 1 or len(places) != 1 or samples == places:
            return None
        return "".join("N" if dim in samples else "L" if dim in places else "C" for dim in range(len(shape)))

    def layout_by_size(self, shape: tuple[int, ...]) -> str | None:
        """Return the layout of a value that has as many samples and tokens as a text among the inputs.

        None where these fit several layouts: of an encoder and a decoder, one may be as long as the other is wide.
        """
        texts = {tuple(each.shape) for each in self._inputs if each.dim() == 2 and not each.is_floating_point()}
        places = {"NLC": shape[:2], "NCL": (shape[0], shape[2]), "LNC": shape[1::-1]}
        fits = [layout for layout, place in places.items() if place in texts]
        return fits[0] if len(fits) == 1 else None

    def _changed(self, key: str, shape: tuple[int, ...], runs: list[Shapes]) -> set[int]:
        found: set[int] = set()
        for shapes in runs:
            there = shapes.get(key, shape)
            if len(there) == len(shape):
                found.update(dim for dim, (now, before) in enumerate(zip(there, shape, strict=True)) if now != before)
        return found

    @property
    def _lengths(self) -> list[int]:
        """The lengths of the texts and signals: of an encoder's input and of a decoder's, say."""
        return list(dict.fromkeys(size for value in self._inputs for size in value.shape[1:]))

    @cached_property
    def _three_times_as_many_and_longer(self) -> Shapes:
        """The shapes for three times as many samples, of twice the lengths; nothing where an input has channels."""
        batch, *lengths = self._inputs[0].shape if self._inputs else (0,)
        if len(lengths) != 1:
            return {}
        return self._shapes(
            lambda value: [
                3 * size if dim == 0 and size == batch else 2 * size if dim > 0 and size in self._lengths else size
                for dim, size in enumerate(value.shape)
            ],
            has_guards=False,
        )[0]

    @cached_property
    def _more_samples(self) -> Shapes:
        batch = self._inputs[0].shape[0] if self._inputs else 0
        return self._shapes(
            lambda value: [size + (dim == 0 and size == batch) for dim, size in enumerate(value.shape)],
            has_guards=False,
        )[0]

    @cached_property
    def _longer(self) -> list[Shapes]:
        return [self._of_length(length) for length in self._lengths]

    def _of_length(self, length: int) -> Shapes:
        def other(factor: float) -> Shapes:
            new = max(int(length * factor), 1)
            shapes, is_whole = self._shapes(
                lambda value: [new if dim > 0 and size == length else size for dim, size in enumerate(value.shape)],
                has_guards=False,
            )
            return shapes if is_whole else {}

        return other(2) or other(0.5)

    def _shapes(self, resize: _Resize, *, has_guards: bool = True) -> tuple[Shapes, bool]:
        """Return the shapes for other inputs, and whether the graph takes them.

        Guards ask for values, which decide nothing about shapes where the nodes are the same.
        """

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(resize(value), dtype=value.dtype, device="meta")

        args, kwargs = tree_map(resized, (self._example.args, self._example.kwargs))
        small = Graph()
        output: Any = small.graph_copy(self._graph(), {})
        small.output(output)
        if not has_guards:
            for node in [node for node in small.nodes if node.meta.get("is_guard")]:
                small.erase_node(node)
            small.eliminate_dead_code()
        is_whole = False
        found: dict[Node, tuple[int, ...]] = {}
        with suppress(Exception):  # code of the model may raise anything at other sizes
            replica = Replica(self._model, copies_tensors="forms")  # other threads may run and train the model
            try:
                _NotesShapes(GraphModule(replica.root, small), found).propagate(*args, **kwargs)
                is_whole = True
            finally:
                replica.drop()
        return {key: found[node] for key, node in output.items() if node in found}, is_whole


class _NotesShapes(ShapeProp):
    """Notes the shapes of tensors, up to a node that does not take the inputs."""

    def __init__(self, gm: GraphModule, found: dict[Node, tuple[int, ...]]) -> None:
        super().__init__(gm)
        self.found = found

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.found[n] = tuple(result.shape)
        return result
