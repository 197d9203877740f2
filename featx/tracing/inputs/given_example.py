"""Read the example that a caller gives for a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from featx.examples import Example, as_example, without_cache
from featx.tracing.inputs.dict_inputs import keys_read_by


def given_example(model: nn.Module, example_inputs: Any) -> Example:
    """Return what a caller gave as `example_for`.

    A model of transformers gets `use_cache=False`, unless the caller says something of its cache, as in `find_example`.

    Raises:
        ArgumentTypeError: as for `as_example`.
    """
    example = example_for(model, example_inputs)
    if (
        not isinstance(example_inputs, Example)
        and hasattr(model, "main_input_name")
        and "past_key_values" not in example.kwargs
    ):
        with suppress(TypeError):  # inputs that do not fit are refused when they are bound
            return example.with_options(without_cache(model), model.forward)
    return example


def example_for(model: nn.Module, example_inputs: Any) -> Example:
    """Return what a caller gave as `as_example`; a dict or list that is the one input of a model is that input.

    Raises:
        ArgumentTypeError: as for `as_example`.
    """
    example = as_example(example_inputs)
    if type(example_inputs) is list and _takes_one_list(model, example.args):
        return replace(example, args=(example_inputs,))
    if not isinstance(example_inputs, Example) and example.kwargs and _takes_one_dict(model, example.kwargs):
        return replace(example, args=(example_inputs,), kwargs={})
    return example


def _takes_one_list(model: nn.Module, inputs: Sequence[Any]) -> bool:
    """Say whether forward takes a list as its one input: it takes fewer inputs than items, or is annotated so."""
    signature = inspect.signature(model.forward)
    first = next(iter(signature.parameters.values()), None)
    if first is not None and str(first.annotation).lower().startswith(("list[", "typing.list[")):
        return not any(isinstance(each, (list, tuple)) for each in inputs)
    try:
        signature.bind(*inputs)
    except TypeError:
        with suppress(TypeError):
            signature.bind(inputs)
            return True
    return False


def _takes_one_dict(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Say whether inputs are no inputs by name, and forward reads one input as a dict, or says that it is one."""
    signature = inspect.signature(model.forward)
    with suppress(TypeError):
        signature.bind(**inputs)
        return False
    needed = [each for each in signature.parameters.values() if each.default is each.empty]
    if len(needed) != 1 or needed[0].kind not in (needed[0].POSITIONAL_ONLY, needed[0].POSITIONAL_OR_KEYWORD):
        return False
    declared = str(needed[0].annotation).lower()
    return bool(keys_read_by(model, needed[0].name)) or "dict[" in declared or "mapping[" in declared
