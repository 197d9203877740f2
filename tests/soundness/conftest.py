"""What the tests with random models share: featx as what is under test, and one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from comparison import Library

import featx


@pytest.fixture
def library() -> Library:
    """The tracer and the extractor of featx."""
    return Library(featx.trace, featx.FeatxError, featx.create_feature_extractor, featx.get_graph_node_names)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run small models in one thread: several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
