"""Descriptions of Python objects, which tell whether a call has changed what they hold."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from featx.tracing.objects.python_state import PythonState


def test_a_function_without_state_is_the_same_wherever_it_was_described_before() -> None:
    """Activations are functions that many modules share."""

    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    for function in (functional.gelu, functional.relu6, own, math.sqrt):
        describe = PythonState()
        describe.of(function)
        assert describe.of({"act": function}) == PythonState().of({"act": function})


def test_a_method_of_a_list_has_the_state_of_the_list() -> None:
    held = [1]
    before = PythonState().of(held.append)
    held.append(2)
    assert PythonState().of(held.append) != before
