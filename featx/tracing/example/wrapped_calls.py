"""Calls of Python functions that a trace hears of: those that are one node, cached ones, and some of Python's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from math import trunc
from typing import Any

import torch

from featx.tracing.environment.generators import SharedGenerators
from featx.tracing.environment.pass_through import is_question, is_seeding, is_switching
from featx.tracing.example.calls import Calls
from featx.tracing.guards.scalars import Diverged, TracedFloat, TracedInt, pinned, plain_number, plain_numbers
from featx.tracing.signals import LeftBehind, Unfollowable
from featx.tree import tree_leaves

_GRADIENTS = (
    "whether gradients are enabled (make the extractor in the mode in which it will run: under torch.no_grad())"
)
_PLAIN_KINDS: dict[type, type] = {TracedInt: int, TracedFloat: float}


class WrappedCalls(Calls):
    """What one trace does with the calls of functions under whose names it listens (`pass_through.py`)."""

    def watch(self, value: Any) -> None:
        """Look after what a cached function has returned, which lives on."""
        raise NotImplementedError

    def on_wrapped(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a function that is one node, of a cached one, of `math`, `int`, `float` or `len`."""
        if self.replay is not None:
            return self.replay.on_wrapped(function, args, kwargs)
        if isinstance(function, functools._lru_cache_wrapper):
            # Past the cache, which must not keep a tensor of this trace.
            result = function.__wrapped__(*args, **kwargs)
            self.watch(result)
            return result
        if function is torch.is_grad_enabled:
            return self.on_grad_question()
        if function is type:
            kind = type(*args, **kwargs)
            return _PLAIN_KINDS.get(kind, kind)
        if is_seeding(function) and not self.whole:
            raise LeftBehind("forward seeds torch's random generator, or puts it back,")
        if is_switching(function) and not self.whole:
            raise LeftBehind(f"forward sets a switch of torch for the whole process ({function.__name__})")
        if is_question(function):
            return self._on_question(function, args, kwargs)
        if self.whole or not self._is_followed((*tree_leaves(args), *tree_leaves(kwargs))):
            return function(*args, **kwargs)
        if function is range:
            return self._on_range(args)
        if function is min or function is max:
            return self._on_extreme(function, args, kwargs)
        if function is int or function is float:
            return self._on_conversion(function, args, kwargs)
        if function is len:
            (value,) = args
            return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)
        if getattr(math, getattr(function, "__name__", ""), None) is function:
            return self._on_math(function, args)
        with torch._C.DisableTorchFunction():
            arguments = tuple([self.create_arg(value) for value in args])
            keywords = {key: self.create_arg(value) for key, value in kwargs.items()}
        plain_args, plain_kwargs = plain_numbers((args, kwargs))
        call = functools.partial(function, *plain_args, **plain_kwargs)
        values = (args, kwargs)
        with self.kernels.seen():
            result = self._as_one_node("call_function", function, arguments, keywords, values, call, is_measured=True)
        if self.call_record is not None:
            self.call_record.note(function, args, kwargs, result)
        return result

    def on_grad_question(self) -> bool:
        """Answer whether gradients are enabled, and record that the answer must be the same again."""
        answer = torch.is_grad_enabled()
        if not self.whole:
            node = self._create_plain_node("call_function", torch.is_grad_enabled, (), {})
            self.gradient_checks.append(self._guard(node, answer, _GRADIENTS))
        return answer

    def _on_question(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = function(*args, **kwargs)
        if not self.whole:
            node = self._create_plain_node("call_function", function, args, kwargs)
            self._guard(node, answer, f"what torch.{function.__name__}() answers")
        return answer

    def _on_math(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        arguments = tuple([self.create_arg(value) for value in args])
        self.whole += 1
        try:
            result = function(*plain_numbers(args))
        finally:
            self.whole -= 1
        if isinstance(result, bool) or not isinstance(result, (int, float)):
            return result
        return self.follow(result, self.add_node("call_function", function, arguments, {}, None, None), None)

    def _on_conversion(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = args[0]
        if kwargs or len(args) > 1 or not isinstance(number, (TracedInt, TracedFloat)):
            return kind(*args, **kwargs)
        if isinstance(number, kind):
            return number
        return self.compute(trunc if kind is int else float, args, kind(plain_number(number)))

    def _on_extreme(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A float compares itself with an int in C: the comparison is turned round.
        items: Any = args if len(args) > 1 else next(iter(args))
        if kwargs or not isinstance(items, (tuple, list)) or not any(type(item) is float for item in items):
            return function(*args, **kwargs)
        best, *others = items
        for item in others:
            first, second = (item, best) if function is min else (best, item)
            if second > first if type(first) is float else first < second:
                best = item
        return best

    def _on_range(self, args: tuple[Any, ...]) -> range:
        # How often a loop runs is part of the graph; for which sizes that holds is not fixed further.
        found = range(*plain_numbers(args))
        seen: set[int] = set()
        if len(args) > 1 and len(found) > 0:
            seen.add(0)  # where it starts
        if len(args) > 2 and len(found) > 1:
            seen.add(2)  # how far apart the numbers are
        bounds = tuple(
            [pinned(value) if index in seen and type(value) is TracedInt else value for index, value in enumerate(args)]
        )
        node = self._create_plain_node("call_function", range, tuple(map(self.create_arg, bounds)), {})
        length = self._create_plain_node("call_function", len, (node,), {})
        self._guard(length, len(found), "how often a loop runs")
        return found

    def on_draw(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a random generator that is not torch's: inside a module that is kept whole only."""
        if self.replay is not None:
            raise Diverged
        if self.whole:
            self.drew = True
            self._generators = self._generators or SharedGenerators()
            return function(*args, **kwargs)
        raise Unfollowable(f"forward draws from a random generator of Python or numpy ({function.__name__})")
