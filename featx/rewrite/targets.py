"""Say whether a node of a graph calls, or reads, what a node of a pattern does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, PatternError
from featx.ir.equality import is_same
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.ir.verify import find_attribute
from featx.rewrite.pattern import Pattern
from featx.rewrite.wildcards import AnyOf

MatchModules: TypeAlias = Literal["path", "type", "config"]
# Whether a node of the graph may be matched, whatever its arguments.
Test: TypeAlias = Callable[[Node], bool]

# Attributes that every module has: they say nothing about how it computes.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def tests_of(
    pattern: Pattern, root: nn.Module | None, match_modules: MatchModules, match_placeholder: bool
) -> dict[Node, Test]:
    """Return the test of each node of `pattern`, for a graph whose targets `root` has; without one anything goes.

    Raises:
        ArgumentTypeError: `match_modules` is none of its values.
        PatternError: modules are to be compared, and it is not known which module the pattern or the graph calls.
    """
    if match_modules not in ("path", "type", "config"):
        raise ArgumentTypeError(f"match_modules must be 'path', 'type' or 'config', got {match_modules!r}")
    tests: dict[Node, Test] = {}
    for node in pattern.graph.nodes:
        if node.op == "placeholder" and not match_placeholder:
            continue
        if node.op in ("placeholder", "output"):
            tests[node] = _SameOpcode(node.op)
        elif isinstance(node.target, AnyOf):
            tests[node] = _OneOf(node.target, root)
        elif node.op == "get_attr":
            tests[node] = _SameAttribute(node, pattern.root, root, with_form=match_modules == "config")
        elif node.op == "call_module" and match_modules != "path":
            tests[node] = _SameModule(node, pattern.root, root, with_settings=match_modules == "config")
        else:
            tests[node] = _SameTarget(node)
    return tests


class AlsoNamed:
    """Accepts what another test accepts, and nodes whose names contain a text."""

    def __init__(self, test: Test, text: str) -> None:
        self._test, self._text = test, text

    def __call__(self, node: Node) -> bool:  # noqa: D102 - magic
        return self._text in node.name or self._test(node)


class _SameOpcode:
    def __init__(self, op: str) -> None:
        self._op = op

    def __call__(self, node: Node) -> bool:
        return node.op == self._op


class _SameTarget:
    def __init__(self, node: Node) -> None:
        self._op, self._target = node.op, node.target

    def __call__(self, node: Node) -> bool:
        return node.target == self._target and node.op == self._op


class _OneOf:
    """Accepts calls of one of several functions, methods by name, or modules by class."""

    def __init__(self, choice: AnyOf, root: nn.Module | None) -> None:
        self._choices, self._root = choice.choices, root

    def __call__(self, node: Node) -> bool:
        if node.op == "call_module":
            kind = type(_module_at(self._root, node))
            return any(choice is kind for choice in self._choices)
        is_name = node.op == "call_method"
        return (is_name or node.op == "call_function") and any(
            isinstance(choice, str) is is_name and choice == node.target for choice in self._choices
        )


class _SameModule:
    """Accepts calls of modules of one class, and with the same settings if that is asked for."""

    def __init__(
        self, node: Node, pattern_root: nn.Module | None, root: nn.Module | None, *, with_settings: bool
    ) -> None:
        self._module = _module_at(pattern_root, node)
        if self._module is None or root is None:
            whose = "pattern's" if self._module is None else "searched"
            raise PatternError(
                f"the {whose} graph does not know its module, so '{node.target}' cannot be compared by class; "
                "keep the GraphModule alive and pass that, or match by path"
            )
        self._root = root
        self._with_settings = with_settings
        self._known: dict[str, bool] = {}

    def __call__(self, node: Node) -> bool:
        if node.op != "call_module":
            return False
        known = self._known.get(node.target)
        if known is None:
            module = _module_at(self._root, node)
            known = type(module) is type(self._module) and (
                not self._with_settings or has_same_settings(cast(nn.Module, self._module), cast(nn.Module, module))
            )
            self._known[node.target] = known
        return known


class _SameAttribute:
    """Accepts reads of a tensor of one class (a parameter or not), or of a value equal to the pattern's."""

    def __init__(self, node: Node, pattern_root: nn.Module | None, root: nn.Module | None, *, with_form: bool) -> None:
        self._wanted = None if pattern_root is None else find_attribute(pattern_root, node.target, node)
        self._root = root
        self._with_form = with_form

    def __call__(self, node: Node) -> bool:
        if node.op != "get_attr":
            return False
        if self._root is None:
            return True
        value = find_attribute(self._root, node.target, node)
        if self._wanted is None:
            return isinstance(value, torch.Tensor)
        if not isinstance(self._wanted, torch.Tensor):
            return is_same(self._wanted, value)
        return type(value) is type(self._wanted) and (not self._with_form or _has_same_form(self._wanted, value))


def has_same_settings(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two modules differ in nothing but the values of their tensors and in their modes.

    Compared are the classes, the shapes and dtypes of parameters and buffers, and every attribute that the module's
    own code has set (`stride`, `eps`, `inplace`...), for the modules inside them too.
    """
    if type(one) is not type(other):
        return False
    for registry in ("_parameters", "_buffers"):
        tensors, others = vars(one)[registry], vars(other)[registry]
        if tensors.keys() != others.keys():
            return False
        if not all(_has_same_form(value, others[name]) for name, value in tensors.items()):
            return False
    settings, other_settings = (
        {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE} for module in (one, other)
    )
    if settings.keys() != other_settings.keys():
        return False
    if not all(_is_same_setting(value, other_settings[name]) for name, value in settings.items()):
        return False
    children, others = dict(one.named_children()), dict(other.named_children())
    return children.keys() == others.keys() and all(
        has_same_settings(child, others[name]) for name, child in children.items()
    )


def is_interchangeable(one: Any, other: Any) -> bool:
    """Say whether two attributes of modules differ in nothing but the values of their tensors."""
    if isinstance(one, nn.Module):
        return isinstance(other, nn.Module) and has_same_settings(one, other)
    return _is_same_setting(one, other)


def _is_same_setting(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return _has_same_form(one, other)
    if isinstance(one, weakref.ref):
        return True  # recurrent modules keep such references to their own weights
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        items, others = cast(tuple[Any, ...], one), cast(tuple[Any, ...], other)
        return len(items) == len(others) and all(map(_is_same_setting, items, others))
    return is_same(one, other)


def _has_same_form(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return type(one) is type(other) and one.shape == other.shape and one.dtype == other.dtype


def _module_at(root: nn.Module | None, node: Node) -> Any:  # Any: whatever is called, a module in nearly all graphs
    return None if root is None else find_attribute(root, node.target, node)


def matched_paths(pattern: Pattern, nodes_map: dict[Node, Any]) -> dict[str, str] | None:
    """Return which path of the graph each path of the pattern was matched to, or None if they contradict each other.

    A path that the pattern uses twice must mean one thing, and what it reads below a module that it calls must lie
    below the module that was matched.
    """
    paths: dict[str, str] = {}
    for node in pattern.attributes:
        found = nodes_map[node].target
        if not isinstance(found, str):
            continue  # matched by name with a call of a function
        if paths.setdefault(node.target, found) != found:
            return None
    for path, found in paths.items():
        owner = longest_prefix(path, paths)
        if owner is not None and found != paths[owner] + path[len(owner) :]:
            return None
    return paths


def longest_prefix(path: str, paths: dict[str, Any]) -> str | None:
    """Return the longest of `paths` that the dotted `path` lies below, if any."""
    return next((parent for parent in parents_of(path) if parent in paths), None)
