"""Say more of a requested name that no node has: what the model has under this name, and what to request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.jit import ScriptModule

from featx.errors import DrawnAwayError, NodeNameError
from featx.examples import Example
from featx.features.building.model_inputs import ModelInputs
from featx.features.requests.attention import with_probabilities
from featx.features.requests.request import PROBABILITIES
from featx.ir.paths import parents_of


def explain(
    error: NodeNameError,
    owner: str,
    modules: Mapping[str, nn.Module],
    example: Example | None,
    inputs: ModelInputs,
    all_names: Callable[[], list[str]],
) -> NodeNameError:
    """Return the error of a name that no node has, or one that says more.

    Args:
        error: the error of `select`.
        owner: the class of the model and its mode, for the message.
        modules: the modules of the model by path; each module has one.
        example: the inputs of the trace; None after a symbolic one.
        inputs: all inputs of the model.
        all_names: returns all names of the model.
    """
    unknown = f"No node '{error.name}' in {owner}"
    first = _first_path_of(error.name, modules)
    if first is not None:
        calls = [name for name in all_names() if re.fullmatch(rf"{re.escape(first)}(_\d+)?", name)]
        asked = f"'{first}'" if len(calls) < 2 else f"one of its calls, {', '.join(map(repr, calls))} in this order"
        reason = f"that is the module '{first}' under a further name; ask for {asked}"
        return NodeNameError(f"{unknown}: {reason}", error.name)
    if error.name not in modules or not str(error).startswith(f"{unknown}."):
        return error
    if example is None:
        left_out = inputs.names_left_out()
        if not left_out:
            return error
        reason = (
            f"the module of this name does not run where {', '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} "
            f"None, as forward has it; give example_inputs, such as example_inputs={{'{left_out[0]}': ...}}"
        )
        return NodeNameError(f"{unknown}: {reason}", error.name)
    if error.kept_whole or isinstance(error, DrawnAwayError):
        return error
    reason = (
        f"the module of this name does not run on {inputs.describe(example)}. Give example_inputs with which it runs; "
        "if it runs in one mode only, give train_return_nodes and eval_return_nodes."
    )
    compiled = [each for each in parents_of(error.name) if isinstance(modules.get(each), ScriptModule)]
    if compiled:
        reason = (
            f"it lies inside of '{compiled[0]}', a module that torch.jit has compiled, which no trace looks into. "
            f"Request '{compiled[0]}'"
        )
    elif (fused := _fused_around(error.name, with_probabilities(all_names(), modules))) is not None:
        reason = f"attention is fused there, and does without that module; ask for '{fused}'"
    return NodeNameError(f"{unknown}: {reason}", error.name)


def _fused_around(path: str, names: Iterable[str]) -> str | None:
    """Return the name of the probabilities of a fused attention in which a module lies; None if there is none."""
    around = [f"{each}.{PROBABILITIES}" for each in parents_of(path)]
    return next((name for name in names if name in around), None)


def _first_path_of(name: str | None, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path that a module of the model has first, where `name` is a further one of it; else None."""
    if not name or name in modules:
        return None
    try:
        module = modules[""].get_submodule(name)
    except AttributeError:
        return None
    return next((path for path, each in modules.items() if each is module), None)
