"""Which values of a graph are computed from which images among its inputs, and which from texts."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from featx.features.describing.images import ImageInput
from featx.ir.form import sources_of_values
from featx.ir.graph import Graph
from featx.ir.node import Node

_IDS = frozenset({torch.int64, torch.int32})


class InputSources:
    """Says whether tokens may be those of patches of an image, for a model that gets ids of a text besides. O(nodes).

    As many tokens as the image has patches are those of the text, if they are computed from as many ids, or are not
    computed from the image.
    """

    def __init__(self, graph: Graph) -> None:
        self._containers: set[Node] = set()
        self._from_images: set[Node] = set()
        # The lengths of the texts that nodes are computed from.
        self._lengths: dict[Node, frozenset[Any]] = {}
        if any(map(_may_be_text, graph.nodes)):  # mostly there is none
            for node in graph.nodes:
                self._visit(node)
        self._has_texts = any(self._lengths.values())

    def may_be_patches(self, node: Node, tokens: int) -> bool:
        """Say whether the value of a node may be tokens of patches, which has so many tokens."""
        if not self._has_texts:
            return True
        is_from_image = node in self._from_images or not self._from_images
        return is_from_image and tokens not in self._lengths[node]

    def _visit(self, node: Node) -> None:
        inputs = sources_of_values(node)
        is_item = node.target is operator.getitem and len(inputs) == 1 and inputs[0] in self._containers
        lengths = frozenset[Any]().union(*(self._lengths[each] for each in inputs))
        if any(each in self._from_images for each in inputs):
            self._from_images.add(node)
        if node.op == "placeholder" or is_item:
            shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
            if shape is None or dtype is None:
                self._containers.add(node)
            elif dtype.is_floating_point and len(shape) >= 3:
                self._from_images.add(node)
            elif _may_be_text(node):
                lengths |= {shape[1]}
        self._lengths[node] = lengths


def _may_be_text(node: Node) -> bool:
    is_given = node.op == "placeholder" or node.target is operator.getitem
    return is_given and node.meta.get("dtype") in _IDS and len(node.meta.get("shape", ())) == 2


def images_of_values(graph: Graph, images: Sequence[ImageInput]) -> dict[Node, list[ImageInput]]:
    """Return the images that values are computed from, those with most dimensions: no signal beside an image. O(nodes).

    Args:
        graph: of values.
        images: those among the inputs of the model.
    """
    # What has one place, such as a style of 512x1x1, is no image.
    by_path = {image.path: image for image in images if image.path and math.prod(image.sizes) > 1}
    paths: dict[Node, str] = {}
    found: dict[Node, list[ImageInput]] = {}
    for node in graph.nodes:
        inputs = sources_of_values(node)
        if node.op == "placeholder":
            paths[node] = str(node.target)
        elif node.target is operator.getitem and inputs[:1] and inputs[0] in paths:
            paths[node] = f"{paths[inputs[0]]}[{node.args[1]!r}]"
        image = by_path.get(paths.get(node, ""))
        sources = [image] if image is not None else [image for each in inputs for image in found[each]]
        most = max((len(image.sizes) for image in sources), default=0)
        found[node] = list(dict.fromkeys(image for image in sources if len(image.sizes) == most))
    return found
