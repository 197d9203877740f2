from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.codegen.identifiers import attribute
from featx.codegen.paths import ModulePaths
from featx.ir.names import Namespace


def write(*paths: str) -> list[str]:
    """Return the statements that fetch these paths, one after the other."""
    module_paths = ModulePaths("self", paths, Namespace().create_name)
    statements: list[str] = []
    for path in paths:
        expression = module_paths.expression(path, statements)
        statements.append(f"fetch {expression}")
    return [statement.rstrip("\n") for statement in statements]


def test_path_that_shares_nothing_is_written_out() -> None:
    assert write("conv", "layer1.0.conv", "head.norm") == [
        "fetch self.conv",
        'fetch getattr(self.layer1, "0").conv',
        "fetch self.head.norm",
    ]


def test_prefix_of_two_paths_is_fetched_once() -> None:
    assert write("layer1.conv", "layer1.bn") == ["layer1 = self.layer1", "fetch layer1.conv", "fetch layer1.bn"]


def test_prefix_is_fetched_where_it_is_first_needed() -> None:
    assert write("stem", "a.x", "b.x", "a.y", "b.y") == [
        "fetch self.stem",
        "a = self.a",
        "fetch a.x",
        "b = self.b",
        "fetch b.x",
        "fetch a.y",
        "fetch b.y",
    ]


def test_only_prefixes_at_which_paths_part_get_a_variable() -> None:
    assert write("a.b.c.one", "a.b.c.two", "a.b.d") == [
        "a_b = self.a.b",
        "a_b_c = a_b.c",
        "fetch a_b_c.one",
        "fetch a_b_c.two",
        "fetch a_b.d",
    ]


def test_module_that_is_called_and_looked_into_gets_a_variable_only_from_two_looks_on() -> None:
    assert write("layer", "layer.weight") == ["fetch self.layer", "fetch self.layer.weight"]


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("conv", "owner.conv"),
        ("0", 'getattr(owner, "0")'),
        ("class", 'getattr(owner, "class")'),
        ("None", 'getattr(owner, "None")'),
        ("a-b", 'getattr(owner, "a-b")'),
        ('say "hi"', "getattr(owner, 'say \"hi\"')"),
        ("back\\slash", "getattr(owner, 'back\\\\slash')"),
        ("ünï", "owner.ünï"),
    ],
)
def test_attribute_of_any_name_can_be_written(name: str, expression: str) -> None:
    class Owner:
        pass

    owner = Owner()
    setattr(owner, name, marker := object())
    assert attribute("owner", name) == expression
    assert eval(expression, {"owner": owner}) is marker


def test_expressions_lead_to_the_modules_of_a_deep_model() -> None:
    def build(depth: int) -> nn.Module:
        module = nn.ModuleDict({"0": nn.Identity(), "in": nn.Identity()})
        if depth:
            module["left"], module["right"] = build(depth - 1), build(depth - 1)
        return module

    root = build(4)
    paths = [name for name, _ in root.named_modules() if name]
    module_paths = ModulePaths("root", paths, Namespace().create_name)
    scope: dict[str, Any] = {"root": root}
    for path in paths:
        statements: list[str] = []
        expression = module_paths.expression(path, statements)
        exec("".join(statements), scope)
        assert eval(expression, scope) is root.get_submodule(path)


# Python 3.12.0 and 3.12.1 count calls of C code too, up to a limit that cannot be raised.
_TOO_DEEP = pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="docs/limits.md")


@pytest.mark.parametrize("depth", [99, 100, 101, pytest.param(210, marks=_TOO_DEEP)])
def test_path_of_any_depth_can_be_compiled(depth: int) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(depth):
        model = nn.Sequential(model)
    innermost, x = ".".join(["0"] * depth), torch.rand(3, 2)
    extractor = featx.create_feature_extractor(model.eval(), [innermost], example_inputs=x)
    assert torch.equal(extractor(x)[innermost], model.get_submodule(innermost)(x))
