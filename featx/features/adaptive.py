"""AdaptiveExtractor: one extractor for each kind of input that a model treats in another way, made when it comes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featx.errors import RequestError, TraceError
from featx.examples import Example
from featx.features.building.build import CaseTracer
from featx.features.building.case_state import Case, check_case
from featx.features.building.cases import (
    first_in_other_mode,
    has_names_of,
    inputs_by_name,
    trace_for_input,
    with_defaults,
)
from featx.features.building.raising_graph import is_raising
from featx.features.building.rollback import RollbackRunner
from featx.features.describing.info import FeatureInfos
from featx.features.dual import DualGraphModule
from featx.features.own_conversion import check_conversion
from featx.features.shared_tensors import tensors_kept_shared
from featx.tracing.environment.compiler import not_compiled, not_compiled_itself
from featx.tracing.sizes.outcomes import FreeDims

# From inputs, and what is known of the dimensions of others by mode, to an extractor.
Build = Callable[[Any, Any], DualGraphModule]
_LOGGER = logging.getLogger("featx")
# How many graphs are kept. Inputs that need more differ in a property that should be free.
_MOST = 64
# What a GraphModule has of its one graph.
_OF_EACH_GRAPH = ("graph", "code", "to_folder", "print_readable", "train_graph", "eval_graph")


@dataclass
class _Traced:
    """The inputs for which an extractor was made, large ones without values, and in which modes it was compared."""

    example: Example | None
    checked: set[bool]


class AdaptiveExtractor(nn.Module):
    """Computes features of a model for any input, with a graph for each case that the model distinguishes.

    An input for which no graph holds is traced anew, in both modes; that costs what creating an extractor does.
    64 graphs are kept; of more, the one is dropped that has not run for longest.
    Any input may need any part of the model, so this module has all of its parts under their names: submodules,
    parameters and buffers are shared with it, and the keys of the state dict are the model's.

    A graph may find out in the middle that it does not hold. Before another one runs, what it has done is put back:
    writes into inputs, buffers and parameters, attributes of submodules that are kept whole, and random generators.

    Args:
        model: where the values come from.
        first: an extractor for `model`.
        build: makes another one from an example, and the dimensions that are free on the first one.
        tracer: says whether what forward does with inputs depends on an earlier call.
        example: the inputs for which `first` was made, if they are known.
    """

    def __init__(
        self, model: nn.Module, first: DualGraphModule, build: Build, tracer: CaseTracer, example: Example | None
    ) -> None:
        super().__init__()
        state = self.__dict__
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[shared] = model.__dict__[shared]
        state.update(
            training=model.training,
            _model=model,
            _build=build,
            _tracer=tracer,
            _traced={first: _Traced(example, {True, False})},
            _extractors=[first],
            # The same in the order of their last use.
            _used=[first],
            _held_last={},
            _attempts=RollbackRunner(),
        )

    @property
    def traced_model(self) -> nn.Module:
        """What is traced, and whose parts these are."""
        return self._model

    @property
    def extractors(self) -> tuple[DualGraphModule, ...]:
        """The extractors so far, the oldest first."""
        return tuple(self._extractors)

    @property
    def feature_info(self) -> FeatureInfos:
        """What is returned, as the first example has shown it, in the present mode."""
        return self.extractors[0].meta["feature_info"].get(self.training, FeatureInfos(()))

    @property
    def free_dims(self) -> FreeDims | None:
        """Which dimensions of the inputs the first graph leaves free, in the present mode. For others, one is made."""
        return self.extractors[0].meta["free_dims"].get(self.training)

    @not_compiled_itself  # each graph is; the search for one that holds ends where one raises
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the requested values for these inputs.

        A dict of inputs by name, such as what a tokenizer returns, may stand in place of them.

        Raises:
            TraceError: the model cannot be traced on these inputs.
            SpecializationError: forward may read what it has left in an attribute in a call with other inputs.
        """
        args, kwargs = inputs_by_name(self.traced_model, args, kwargs)
        if torch.compiler.is_dynamo_compiling():  # into one graph: it sees the one that ran last
            return self._in_mode(self._held_last.get(self.training, self.extractors[0]))(*args, **kwargs)
        given, kwargs = kwargs, self._with_defaults(len(args), kwargs)
        traced: dict[DualGraphModule, _Traced] = self._traced
        # By mode, as a graph may hold in one and not in the other.
        held_last: dict[bool, DualGraphModule] = self._held_last
        last = held_last.get(self.training, self.extractors[0])
        for extractor in [last, *[one for one in self.extractors if one is not last]]:
            is_first = extractor is self.extractors[0]
            if not is_first and not has_names_of(self._in_mode(extractor).graph, traced[extractor].example, given):
                continue
            self._check(extractor)
            result = self._attempt(extractor, args, kwargs)
            if result is not None:
                held_last[self.training] = extractor
                self._note_use(extractor)
                return result
        example = Example(args, kwargs, "this input")
        extractor = self._traced_for(example)
        traced[extractor] = _Traced(example.without_large_values(), set())
        try:
            self._check(extractor)
            result = self._in_mode(extractor)(*args, **kwargs)
        except BaseException:
            del traced[extractor]
            raise
        self._extractors.append(extractor)
        held_last[self.training] = extractor
        self._note_use(extractor)
        return result

    @not_compiled
    def _check(self, extractor: DualGraphModule) -> None:
        """Raise where the graph of `extractor` in the present mode does not go together with those of the others."""
        traced: dict[DualGraphModule, _Traced] = self._traced
        if self.training in traced[extractor].checked or is_raising(self._in_mode(extractor).graph):
            return
        known = [Case(self._in_mode(each).graph, traced[each].example) for each in self._checked_in(self.training)]
        others = self._checked_in(not self.training)
        in_other_mode = [case for each in others for case in first_in_other_mode(each, traced[each].example)]
        tracer: CaseTracer = self._tracer
        is_unaffected = functools.partial(tracer.is_unaffected, self.traced_model, self.training)
        case = Case(self._in_mode(extractor).graph, traced[extractor].example)
        check_case(case, known, in_other_mode, self.traced_model, is_unaffected)
        traced[extractor].checked.add(self.training)

    def _checked_in(self, training: bool) -> list[DualGraphModule]:
        traced: dict[DualGraphModule, _Traced] = self._traced
        return [each for each in self.extractors if training in traced[each].checked]

    @not_compiled
    def _note_use(self, extractor: DualGraphModule) -> None:
        """Note that an extractor ran, and drop the one that has not for longest where there are too many."""
        used: list[DualGraphModule] = self._used
        if used[-1] is extractor:
            return
        used[:] = [*(each for each in used if each is not extractor), extractor]
        first = self.extractors[0]  # which knows the defaults of inputs
        if len(used) > _MOST:
            dropped = next(each for each in used if each is not first)
            _LOGGER.info("%s keeps %d graphs, and drops one", self._get_name(), _MOST)
            for kept in (used, self._extractors):
                kept[:] = [each for each in kept if each is not dropped]
            del self._traced[dropped]
            held_last: dict[bool, DualGraphModule] = self._held_last
            for mode in [mode for mode, each in held_last.items() if each is dropped]:
                del held_last[mode]

    def graph_modules_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[DualGraphModule]:
        """Yield the extractors, and one for these inputs, which is made when it is asked for and not kept."""
        kwargs = self._with_defaults(len(args), kwargs)
        yield from map(self._in_mode, self.extractors)
        yield self._in_mode(self._traced_for(Example(args, kwargs, "this input")))

    @not_compiled
    def _traced_for(self, example: Example) -> DualGraphModule:
        known = (self._in_mode(each).graph for each in self.extractors)
        dims = self.extractors[0].meta["free_dims"]
        return trace_for_input(lambda: self._build(example, dims), known)

    @not_compiled
    def _with_defaults(self, count: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        return with_defaults(self._in_mode(self.extractors[0]).graph, count, kwargs)

    def _in_mode(self, extractor: DualGraphModule) -> DualGraphModule:
        return extractor if extractor.training is self.training else extractor.train(self.training)

    @not_compiled_itself
    def _attempt(self, extractor: DualGraphModule, args: Any, kwargs: Any) -> dict[str, Any] | None:
        runner = self._in_mode(extractor)
        try:
            return self._attempts.run(runner, runner.graph, self.traced_model, args, kwargs)
        except TraceError:
            return None

    def __getattr__(self, name: str) -> Any:
        """Return a part of the model, or else `channels` or `strides` of what is returned.

        Raises:
            AttributeError: there is none of that name.
        """
        if name in ("channels", "strides") and "_extractors" in self.__dict__ and not self._has_part(name):
            return self.feature_info.channels() if name == "channels" else self.feature_info.reduction()
        if name in _OF_EACH_GRAPH and not self._has_part(name):
            raise AttributeError(
                f"{self._get_name()} has no '{name}', as it has a graph for each kind of input; take "
                f"extractors[0].{name}, that of the example"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is no part.

        Raises:
            RequestError: it is a parameter, a buffer or a module, which would become one of the model.
        """
        if isinstance(value, (nn.Module, nn.Parameter)) or self._has_part(name):
            raise self._error_of_new_part(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._has_part(name):
            raise self._error_of_new_part(name)
        super().__delattr__(name)

    def _has_part(self, name: str) -> bool:
        return any(name in self.__dict__[parts] for parts in ("_parameters", "_buffers", "_modules"))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise RequestError, as `__setattr__` does."""
        raise self._error_of_new_part(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise RequestError, as `__setattr__` does."""
        raise self._error_of_new_part(name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Raise RequestError, as `__setattr__` does."""
        raise self._error_of_new_part(name)

    def _error_of_new_part(self, name: str) -> RequestError:
        model = type(self.traced_model).__name__
        return RequestError(
            f"'{name}' is not set or deleted: the parts of this extractor are those of {model}, which would change. "
            f"Put the extractor and '{name}' into a module of your own, or change {model} and make the extractor again"
        )

    def train(self, mode: bool = True) -> AdaptiveExtractor:
        """Put this module, and the model with it, into train or eval mode."""
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AdaptiveExtractor:
        for extractor in self.extractors:
            check_conversion(extractor, fn)
        with tensors_kept_shared(self._model, self.extractors):
            super()._apply(fn, recurse)
            for extractor in self.extractors:
                extractor._apply(fn, recurse)
        return self

    def _get_name(self) -> str:
        return f"AdaptiveExtractor({type(self._model).__name__})"
