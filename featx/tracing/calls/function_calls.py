"""Calls of Python functions that a trace observes: those that are one node, cached ones, and some of Python's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from featx.errors import TraceError
from featx.ir.effects import Effects
from featx.libraries import advice_for_draws, mask_maker
from featx.tracing.calls.measured_calls import MeasuredCalls
from featx.tracing.environment.generators import SETS_GENERATOR
from featx.tracing.file_globals.pass_through import Answered, answered_as
from featx.tracing.guards.scalars import TracedFloat, TracedInt, plain_numbers
from featx.tracing.history.lineage import source_node
from featx.tracing.objects.replaced_globals import original_of
from featx.tracing.objects.tensor_versions import versions_of
from featx.tracing.recording.numbers import is_of_numbers
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.signals import UnsupportedSideEffect, Untraceable
from featx.tree import tensors_in, tree_leaves

_GRADIENTS = "whether gradients are enabled (make the extractor as it will run, with torch.no_grad() or without)"
_PLAIN_ARGUMENTS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
_TRACED_KINDS = (TracedInt, TracedFloat)


class FunctionCalls:
    """What one trace does with the calls of functions that it replaces by pass-throughs (`pass_through.py`).

    Args:
        recorder: makes the nodes.
        measured: runs functions that are one node.
        model_context: what is traced; knows the caches of its code.
    """

    def __init__(self, recorder: Recorder, measured: MeasuredCalls, model_context: ModelContext) -> None:
        self._recorder = recorder
        self._measured = measured
        self._context = model_context
        # What cached functions have returned: for plain arguments; and all of it, with the versions of its tensors.
        self._cached: dict[Any, Any] = {}
        self._kept_by_caches: list[tuple[str, Any, list[int]]] = []

    def on_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a function that is one node, of a cached one, of `math`, `int`, `float` or `len`."""
        if isinstance(function, functools._lru_cache_wrapper):
            return self._call_cached(function.__wrapped__, args, kwargs)
        maker = mask_maker(function)
        if maker is not None:
            return maker(*args, **kwargs)
        if function is type:
            kind = type(*map(original_of, args), **kwargs)
            return args[0].__class__ if kind in _TRACED_KINDS else kind
        is_inside = self._recorder.opaque_call.is_inside
        match answered_as(function):
            case Answered.SEEDING if not is_inside:
                raise UnsupportedSideEffect(SETS_GENERATOR)
            case Answered.SWITCHING if not is_inside:
                raise UnsupportedSideEffect(
                    f"forward sets a switch of torch for the whole process ({function.__name__})"
                )
            case Answered.REORDERING:
                raise TraceError(
                    f"cannot trace forward: it calls torch.{function.__name__}, which reorders the modes of torch, "
                    "among them that of the trace. To go on, call it before, or use `with torch.device(...)` in "
                    "forward."
                )
            case Answered.SWAPPING:
                raise TraceError(
                    "cannot trace forward: it calls torch.utils.swap_tensors, perhaps by Module.to, which exchanges "
                    "tensors of the model without a torch call that a trace sees. To go on, call it before."
                )
            case Answered.MODE_QUERY:
                answer = self.on_mode_query(function, args, kwargs)
                if function is torch.is_grad_enabled and not is_inside:
                    self._recorder.note_call(function, args, kwargs, answer)
                return answer
            case _:
                pass
        if is_inside:
            return function(*args, **kwargs)
        is_conversion = function is int or function is float
        is_followed = self._recorder.is_followed((*tree_leaves(args), *tree_leaves(kwargs)))
        if not (is_followed or (is_conversion and self._recorder.is_of_graph(args))):
            return function(*args, **kwargs)
        if is_of_numbers(function):
            return self._recorder.numbers.call(function, args, kwargs)
        if function is len:
            (value,) = args
            return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)
        return self._as_one_node(function, args, kwargs)

    def _call_cached(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a cached function past its cache, which must not keep a tensor of this trace.

        For the same plain arguments it returns the same object again. Traced numbers that are equal here may differ
        for other inputs.
        """
        key = None if self._recorder.opaque_call.is_inside else _key_of_plain(function, args, kwargs)
        if key is not None and key in self._cached and self._is_recorded(self._cached[key]):
            return self._cached[key]
        last = next(iter(reversed(self._recorder.graph.nodes)), None)
        result = function(*args, **kwargs)
        added = itertools.takewhile(lambda node: node is not last, reversed(self._recorder.graph.nodes))
        effects = Effects(self._recorder.graph)
        if any(effects.of(node).is_random for node in added):
            raise Untraceable(
                f"the cached function {function.__name__} draws random numbers, which a graph would draw at each call,",
                advice="draw them in __init__, and keep them in a buffer",
            )
        if any(isinstance(each, Iterator) for each in tree_leaves(result)):
            raise Untraceable(f"the cached function {function.__name__} keeps an iterator, which goes on in each call,")
        self._context.caches.watch(result)
        if not self._recorder.opaque_call.is_inside:
            self._kept_by_caches.append((function.__name__, result, versions_of(tensors_in(result))))
        if key is not None:
            self._cached[key] = result
        return result

    def _is_recorded(self, result: Any) -> bool:
        """Say whether the nodes of a result are in the graph still."""
        origins = filter(None, map(self._recorder.lineage.get, tensors_in(result)))
        return not any(source_node(origin).is_erased for origin in origins)

    def check_cached(self) -> None:
        """Raise if forward has written a tensor that a cached function has returned: the next call finds it so.

        Raises:
            Untraceable: it has.
        """
        for name, result, versions in self._kept_by_caches:
            if versions_of(tensors_in(result)) != versions and self._is_recorded(result):
                raise Untraceable(f"forward writes a tensor that the cached function {name} has returned, and keeps,")

    def _as_one_node(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        with torch._C.DisableTorchFunction():
            arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
        plain_args, plain_kwargs = plain_numbers((args, kwargs))
        call = functools.partial(function, *plain_args, **plain_kwargs)
        node = ("call_function", function, arguments, keywords)
        try:
            _, result = self._measured.run(node, args, kwargs, call, is_measured=True)
        except Exception as error:
            recorder.raised.note_failure(error)
            raise
        recorder.note_call(function, args, kwargs, result)
        return result

    def on_mode_query(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer in which mode the thread is, and record that the answer must be the same again."""
        answer = function(*args, **kwargs)
        if not self._recorder.opaque_call.is_inside:
            node = self._recorder.add_unnamed_node("call_function", function, args, kwargs)
            is_of_gradients = function is torch.is_grad_enabled
            what = _GRADIENTS if is_of_gradients else f"what torch.{function.__name__}() answers"
            self._recorder.guards.add(node, answer, what)
        return answer

    def on_draw(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a random generator that is not torch's: inside a module that is kept whole only."""
        if self._recorder.opaque_call.is_inside:
            self._recorder.opaque_call.note_draw()
            return function(*args, **kwargs)
        raise Untraceable(
            f"forward draws from a random generator of Python or numpy ({function.__name__})",
            advice=advice_for_draws(self._context.root),
        )


def _key_of_plain(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a cache would look a call up by; None where an argument is, or holds, more than plain values."""
    leaves = list(tree_leaves((args, kwargs)))
    kinds = tuple(map(type, leaves))  # 1 and 1.0 are equal, and a function may return something else for them
    return (function, args, tuple(kwargs.items()), kinds) if _PLAIN_ARGUMENTS.issuperset(kinds) else None
