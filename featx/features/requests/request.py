"""Requests: which values of a model are asked for, by names, patterns, modules or classes, and under which keys."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, NodeNameError, RequestError
from featx.features.requests.feature import Feature

# What the model itself returns, unless a module or an operation of the model has this name.
OUTPUT = "output"
# What others call it.
OUTPUT_ELSEWHERE = frozenset({"outputs", "out", "result", "return", "logits"})
# The last part of the name of the probabilities of fused attention.
PROBABILITIES = "probabilities"
# What they, or the dropout after them, are called where attention is not fused.
_OF_ATTENTION = ("softmax", "attn", "attention", "dropout", "scores")
_WILDCARDS = re.compile(r"(?:^|(?<=\.))\*\*\.|\*\*|\*|\?|\[[^\]]+\]")
_EXAMPLE = "{'layer4': 'C5'}"
# What stands after the name of a value where somebody means a part of it: `lstm.0`, `lstm[0]`, `layer["out"]`.
_PART = re.compile(r"(\.\d+|\[[^\]]*\])+$")


# What stands in a request for a name: a key, a `Feature` with or without one, several of them, or nothing in a list.
_Key = str | Feature | Sequence[str | Feature] | None


class Request(Mapping[str, str]):
    """Names of nodes, with the keys of the result, in the order in which they were asked for.

    Args:
        keys: by name.
        features: what is done to values, by key; several where a value is returned several times, each with its key.
        expanded: by pattern or class, the names that it stands for. Of those the ones that do not run are left out.
        pending: patterns that match no module, with their keys, and how many names stand before them. They may match
            operations, which a trace knows.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        features: Mapping[str, tuple[Feature, ...]],
        expanded: Mapping[str, list[str]],
        pending: Mapping[str, tuple[_Key, int]],
    ) -> None:
        self._keys = dict(keys)
        self.features = dict(features)
        self.expanded = dict(expanded)
        self.pending = dict(pending)
        self.optional = frozenset(name for names in expanded.values() for name in names)

    def __getitem__(self, name: str) -> str:
        return self._keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def among(self, names: Collection[str], argument: str) -> Request:
        """Return the request with the patterns that match no module matched with these names of nodes.

        Raises:
            NodeNameError: one matches none of them.
        """
        if not self.pending:
            return self
        parts = _Parts(argument)
        parts.features.update(self.features)
        parts.expanded.update(self.expanded)
        ahead = list(self._keys.items())
        free = [name for name in names if name not in self._keys]
        for pattern, (key, place) in self.pending.items():
            parts.keys.update(ahead[:place])
            if not parts.add_pattern(pattern, key, free):
                prefixes = {name[: place.start()] for name in names for place in re.finditer(r"\.|$", name)}
                close = difflib.get_close_matches(_WILDCARDS.sub("", pattern), sorted(prefixes), n=3, cutoff=0.4)
                alike = close or _patterns_like(pattern, names)
                hint = f" Near are {', '.join(map(repr, alike))}." if alike else ""
                hint = hint_of_part(pattern, names) or hint
                probabilities = as_probabilities(pattern)
                if probabilities is not None and any(map(expression_of(probabilities).fullmatch, names)):
                    hint = f" Attention is fused there; ask for its probabilities by '{probabilities}'."
                computed = pattern.removesuffix(PROBABILITIES) + "softmax"
                if computed != f"{pattern}softmax" and any(map(expression_of(computed).fullmatch, names)):
                    hint = f" The model does not fuse attention: it computes the probabilities itself, by '{computed}'."
                raise NodeNameError(
                    f"'{pattern}' in {argument} matches no module and no operation.{hint} `*` stands for one part of a "
                    "path, `**` for any number of parts."
                )
        parts.keys.update(ahead)
        return parts.request()


def _patterns_like(pattern: str, names: Iterable[str]) -> list[str]:
    """Return up to three patterns that match names and have `*` where `pattern` has it: `blocks.*` for `stages.*`."""
    parts = pattern.split(".")
    stars = [place for place, part in enumerate(parts) if part == "*"]
    found: dict[str, None] = {}
    for name in names:
        own = name.split(".")[: len(parts)]
        if stars and len(own) == len(parts) and all(own[place].isdigit() for place in stars):
            found[".".join("*" if place in stars else part for place, part in enumerate(own))] = None
    return list(found)[:3]


def hint_of_part(name: str, known: Collection[str]) -> str:
    """Return how to ask for an item, for the error of a name that seems to mean one; else nothing."""
    by_path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", name)
    if by_path != name and any(f"{each}.".startswith(f"{by_path}.") for each in known):
        return f" Modules are named by their paths: '{by_path}'."
    whole = _PART.sub("", name)
    if whole == name or whole not in known or any(each.startswith(f"{whole}.") for each in known):
        return ""
    return (
        f" '{whole}' is one value; a part of a tuple or dict is what a Feature takes out of it: "
        f"{{'{whole}': Feature('part', apply=lambda value: value[0])}}."
    )


def as_request(return_nodes: Any, argument: str, model: nn.Module | None = None) -> Request:
    """Return a request with its patterns, modules and classes replaced by paths of modules. O(modules).

    In a key `*` stands for what the wildcards of the pattern have matched, or for the path of a module of the class.

    Args:
        return_nodes: a dict from names to keys, or a list of names that are the keys too. A name is a text, which may
            be a pattern (`"blocks.*"`), a module of the model or the model itself, or a class of modules. A key may be
            a `Feature`, or a list of keys and features, which return the value several times.
        argument: what it is called, for messages.
        model: whose modules are meant.

    Raises:
        ArgumentTypeError: it is neither a dict nor in an order, or something in it is no name, or no key.
        RequestError: it is empty, gives one key to two nodes, or has a module that is no part of the model.
        NodeNameError: there is no module of a class.
    """
    if isinstance(return_nodes, Mapping):
        wishes = list(cast(Mapping[Any, Any], return_nodes).items())
    elif isinstance(return_nodes, (set, frozenset)):
        raise ArgumentTypeError(f"{argument} is a set, which has no order; give a list: the result has its order")
    elif isinstance(return_nodes, Iterable) and not isinstance(return_nodes, (str, bytes)):
        wishes = [(wish, None) for wish in cast(Iterable[Any], return_nodes)]
    else:
        raise ArgumentTypeError(
            f"{argument} must be a list of node names or a dict from node names to keys, got {return_nodes!r:.200}"
        )
    if not wishes:
        raise RequestError(f"{argument} is empty; name at least one node, such as {argument}={_EXAMPLE}")
    parts = _Parts(argument)
    paths = {} if model is None else {path: module for path, module in model.named_modules() if path}
    named = {name for name, _ in wishes if isinstance(name, str)}
    for wish, key in wishes:
        if wish is model and model is not None:
            # A child or an input of that name would be taken for it.
            is_taken = OUTPUT in paths or OUTPUT in inspect.signature(model.forward).parameters
            wish, key = ("" if is_taken else OUTPUT), OUTPUT if key is None else key
        if isinstance(return_nodes, Mapping) and not _is_key(key):
            is_turned = isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))
            hint = f"; the node comes first, and then the key: {{module: {_short(wish)}}}" if is_turned else ""
            raise ArgumentTypeError(
                f"{argument} must give texts, a featx.Feature or a list of them as keys, got {_short(key)} for "
                f"{_short(wish)}{hint}"
            )
        parts.add(wish, key, paths, named)
    return parts.request()


class _Parts:
    """A request that is being put together."""

    def __init__(self, argument: str) -> None:
        self.keys: dict[str, str] = {}
        self.features: dict[str, tuple[Feature, ...]] = {}
        self.expanded: dict[str, list[str]] = {}
        self.pending: dict[str, tuple[_Key, int]] = {}
        self._argument = argument

    def add(self, wish: Any, key: _Key, paths: Mapping[str, nn.Module], named: Collection[str]) -> None:
        if isinstance(wish, str):
            is_pattern = _WILDCARDS.search(wish) and wish not in paths
            if not is_pattern:
                self._put_once(wish, key)
            elif not self.add_pattern(wish, key, [path for path in paths if path not in named]):
                self.pending[wish] = (key, len(self.keys))
        elif isinstance(wish, nn.Module):
            found = [path for path, module in paths.items() if module is wish]
            if not found:
                raise RequestError(
                    f"{self._argument} has a {type(wish).__name__} that is no part of the model; give one of its own "
                    "submodules, such as model.layer4, or a name"
                )
            self._put_once(found[0], key)
        elif isinstance(wish, type) and issubclass(wish, nn.Module):
            found = [path for path, module in paths.items() if isinstance(module, wish) and path not in named]
            if not found:
                raise NodeNameError(f"{self._argument} asks for {wish.__name__}, and the model has no such module")
            self._add_all(f"class {wish.__name__}", {path: (path,) for path in found}, key)
        else:
            hint = (
                f"; say of what it is: {{'{wish.key if wish.key in paths else 'layer4'}': Feature(...)}}"
                if isinstance(wish, Feature)
                else ""
            )
            name = getattr(wish, "name", None)
            if isinstance(name, str):  # a row of `featx.nodes`
                hint = f"; give its name: {name!r}"
            raise ArgumentTypeError(
                f"{self._argument} may have names, modules of the model and classes of modules, got {_short(wish)}"
                f"{hint}"
            )

    def add_pattern(self, pattern: str, key: _Key, names: Iterable[str]) -> bool:
        """Add the names that a pattern matches, and say whether there are any."""
        expression = expression_of(pattern)
        matches = ((name, expression.fullmatch(name)) for name in names)
        found = {name: match.groups("") for name, match in matches if match is not None}
        if found:
            self._add_all(pattern, found, key)
        return bool(found)

    def _add_all(self, what: str, found: Mapping[str, tuple[str, ...]], key: _Key) -> None:
        for text in [each.key for each in _features(key)]:
            if text is not None and "*" not in text and len(found) > 1:
                raise RequestError(
                    f"{self._argument} gives the key '{text}' to all {len(found)} values of '{what}'; put a * into the "
                    f"key, such as '{text}*', which stands for what the pattern has matched"
                )
        for name, groups in found.items():
            self._put(name, key, groups)
        self.expanded[what] = list(found)

    def _put_once(self, name: str, key: _Key) -> None:
        if name in self.keys and name not in {each for names in self.expanded.values() for each in names}:
            raise RequestError(f"{self._argument} asks for '{name}' twice, by its name or by the module")
        self._put(name, key)

    def _put(self, name: str, key: _Key, groups: tuple[str, ...] | None = None) -> None:
        features: list[Feature] = []
        for feature in _features(key):
            text = feature.key
            features.append(
                replace(feature, key=name if text is None else text if groups is None else _filled(text, groups))
            )
        if name in self.keys:  # another pattern has matched it too
            known = self.features.get(self.keys[name], (Feature(self.keys[name]),))
            features = [*known, *(each for each in features if each not in known)]
        first = self.keys.setdefault(name, str(features[0].key))
        if features != [Feature(first)]:
            self.features[first] = tuple(features)

    def request(self) -> Request:
        """Return the request.

        Raises:
            RequestError: one key is given to two nodes.
        """
        by_key: dict[str, str] = {}
        for name, first in self.keys.items():
            for key in [str(each.key) for each in self.features.get(first, (Feature(first),))]:
                if key in by_key:
                    twice = f"{[by_key[key], name]}; each node needs a key of its own"
                    twice = twice if by_key[key] != name else f"'{name}' twice; each value needs a key of its own"
                    raise RequestError(f"{self._argument} gives the key '{key}' to {twice}")
                by_key[key] = name
        return Request(self.keys, self.features, self.expanded, self.pending)


def as_probabilities(name: str) -> str | None:
    """Return the name of the probabilities of fused attention, if `name` looks like one of those that are not fused."""
    module, dot, last = name.rpartition(".")
    return f"{module}{dot}{PROBABILITIES}" if last.startswith(_OF_ATTENTION) else None


def expression_of(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a pattern of names, with a group for each wildcard.

    `*` is one part of a path, `**` any number of parts, `**.` at the start of one any number that may be none, `?` one
    character, and `[34]` one of these.

    Raises:
        RequestError: what stands in brackets is no set of characters.
    """
    parts: list[str] = []
    end = 0
    for match in _WILDCARDS.finditer(pattern):
        parts.append(re.escape(pattern[end : match.start()]))
        wildcard = match.group()
        known = {"**.": r"(?:(.+)\.)?", "**": "(.+)", "*": "([^.]*)", "?": "([^.])"}
        parts.append(known.get(wildcard) or f"({wildcard.replace('[!', '[^', 1)})")
        end = match.end()
    try:
        return re.compile("".join(parts) + re.escape(pattern[end:]))
    except re.error as error:
        raise RequestError(
            f"'{pattern}' is no pattern of names: {error}; '[34]' is one of several characters"
        ) from error


def _is_key(key: object) -> bool:
    if isinstance(key, (list, tuple)):
        return bool(key) and all(map(_is_single_key, cast(Sequence[object], key)))
    return _is_single_key(key)


def _is_single_key(key: object) -> bool:
    return isinstance(key, (str, int, Feature)) and not isinstance(key, bool)


def _features(key: _Key) -> list[Feature]:
    keys: list[str | int | Feature | None] = list(key) if isinstance(key, (list, tuple)) else [cast(Any, key)]
    texts = [str(each) if isinstance(each, int) else each for each in keys]  # as torchvision does
    return [each if isinstance(each, Feature) else Feature(each) for each in texts]


def _short(wish: object) -> str:
    if isinstance(wish, torch.Tensor):
        return f"a {type(wish).__name__} of shape {tuple(wish.shape)}"
    return f"a {type(wish).__name__}" if isinstance(wish, (nn.Module, Feature)) else f"{wish!r:.200}"


def _filled(key: str, groups: tuple[str, ...]) -> str:
    if key.count("*") == len(groups):
        for group in groups:
            key = key.replace("*", group, 1)
        return key
    return key.replace("*", ".".join(groups))
