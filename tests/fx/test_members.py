"""The classes and functions of `featx.fx` take what torch.fx's take, and have their members, but for what is said."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import featx.fx
from featx.migration.table import MEMBERS, TABLE, TORCH, names_here, said

if not torch.__version__.startswith(f"{TORCH}."):
    pytest.skip(f"the table is of torch {TORCH}", allow_module_level=True)


def public_members(kind: type) -> set[str]:
    inherited = set(dir(nn.Module)) if issubclass(kind, nn.Module) else set(dir(object))
    return {name for name in dir(kind) if not name.startswith("_")} - inherited


def pairs() -> list[tuple[str, Any, Any]]:
    """Return torch.fx's classes and functions, and featx's, by their names."""
    found: dict[str, tuple[Any, Any]] = {}
    for path, row in TABLE.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = importlib.import_module(f"torch.fx.{path}".rstrip("."))
        for module, there, name in names_here(row):
            value = getattr(theirs, name, None)
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(f"{path}.{name}", (value, getattr(importlib.import_module(module), there)))
    return [(name, *pair) for name, pair in found.items()]


PAIRS = pairs()


@pytest.mark.parametrize("name", MEMBERS)
def test_class_has_every_public_member_or_the_table_says_why_not(name: str) -> None:
    theirs, ours = getattr(torch.fx, name), getattr(featx.fx, name)
    left_out = set(said(MEMBERS[name].left_out))
    assert {member for member in public_members(theirs) if not hasattr(ours, member)} == left_out
    assert [member for member in said(MEMBERS[name].otherwise) if not hasattr(ours, member)] == []


def test_every_documented_class_has_a_row_of_members() -> None:
    documented = {name for name in torch.fx.__all__ if inspect.isclass(getattr(torch.fx, name))}
    assert documented - {"CodeGen"} == set(MEMBERS)


def missing_parameters(theirs: Any, ours: Any) -> list[str]:
    """Return the parameters of `theirs` that a call could give and `ours` would not take in the same way."""
    try:
        wanted, taken = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return []
    kinds = {parameter.kind for parameter in taken.values()}
    positions = [name for name, parameter in taken.items() if parameter.kind in POSITIONAL]
    missing: list[str] = []
    for place, (name, parameter) in enumerate(wanted.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_name = name in taken or inspect.Parameter.VAR_KEYWORD in kinds
        by_place = positions[place : place + 1] == [name] or inspect.Parameter.VAR_POSITIONAL in kinds
        if not by_name or (parameter.kind in POSITIONAL and not by_place):
            missing.append(name)
    required = [name for name, parameter in taken.items() if parameter.default is parameter.empty and name != "self"]
    return missing + [name for name in required if name not in wanted and taken[name].kind in POSITIONAL]


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# What torch.fx takes and featx does not, each for a reason.
NOT_TAKEN = {
    # Options of printed code, for colours, strides, devices and torch.compile.
    "Graph.python_code": [
        "include_stride", "include_device", "colored", "expanded_def", "record_func", "additional_meta"
    ],
    "GraphModule.print_readable": [
        "include_stride", "include_device", "colored", "fast_sympy_print", "expanded_def", "additional_meta"
    ],
    "graph_module.PythonCode": ["_lineno_map", "_prologue_start", "tensors", "lines"],  # made by featx
    "graph.PythonCode": ["_lineno_map", "_prologue_start", "tensors", "lines"],  # made by featx
    "passes.split_utils.split_by_tags": ["GraphModuleCls"],  # there is one class
    # Private there: code calls them with positional arguments.
    "node._get_qualified_name": ["func", "function"],
    "_symbolic_trace._assert_is_none": ["msg", "name"],
    "passes.shape_prop._extract_tensor_metadata": ["result", "include_contiguity", "tensor"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "theirs", "ours"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_call_that_torch_fx_takes_is_taken(name: str, theirs: Any, ours: Any) -> None:
    # torch.fx's GraphModule has a __new__ that takes anything.
    is_class = inspect.isclass(theirs)
    found = {name: missing_parameters(*(kind.__init__ if is_class else kind for kind in (theirs, ours)))}
    if inspect.isclass(theirs) and inspect.isclass(ours):
        for member in sorted(public_members(theirs) & set(dir(ours))):
            method = inspect.getattr_static(theirs, member)
            if inspect.isfunction(method):
                found[f"{theirs.__name__}.{member}"] = missing_parameters(method, getattr(ours, member))
    assert {key: names for key, names in found.items() if names != NOT_TAKEN.get(key, [])} == {}
