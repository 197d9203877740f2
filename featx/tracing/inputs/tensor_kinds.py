"""Tensors of a class of their own, or with attributes of their own, in whose place a trace has plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType

import torch
from torch import nn

from featx.errors import FeatxError
from featx.tracing.signals import Untraceable
from featx.tracing.source.location import names_in, texts_in
from featx.tracing.source_uses.code_queries import asks_for_kind_of_variable

_OF_TORCH = frozenset(nn.Parameter.__mro__) | {nn.Buffer, nn.parameter.UninitializedBuffer}
_ADVICE = (
    "give plain tensors (x.as_subclass(torch.Tensor)), and what forward reads of them besides values as inputs of "
    "their own"
)


class TensorKinds:
    """What the code of a model may ask of such tensors: their classes, and attributes that no plain tensor has."""

    def __init__(self) -> None:
        # By name, what has it.
        self._names: dict[str, str] = {}
        # Those of attributes that are None, as a call of the model may have left them: forward may set them.
        self._left_none: set[str] = set()
        # The class of an input, for which code may ask without a name: type(x).
        self._asked_class = ""

    def note_input(self, tensor: torch.Tensor) -> None:
        """Take note of an input, in whose place a trace has another tensor."""
        kind = type(tensor)
        self._note_class(kind, "an input")
        if kind is not torch.Tensor:
            self._asked_class = f"an input is of the class {kind.__name__}"
            self._names["__class__"] = self._names.setdefault(kind.__name__, self._asked_class)
        for name, value in vars(tensor).items():
            self._names[name] = self._names["__dict__"] = f"an input has the attribute '{name}'"
            if value is None:
                self._left_none.add(name)

    def note_model(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of the tensors of the model. Their attributes are there in a trace, and their classes are not."""
        for kind in {type(tensor) for tensor in tensors} - _OF_TORCH:
            self._note_class(kind, "a tensor of the model")

    def _note_class(self, of_tensor: type, what: str) -> None:
        for kind in of_tensor.__mro__:
            if kind not in _OF_TORCH:
                own = {name for name in vars(kind) if not name.startswith("__")} - vars(torch.Tensor).keys()
                self._names.update(dict.fromkeys({kind.__name__, *own}, f"{what} is of the class {kind.__name__}"))

    def check(self, codes: Callable[[], Iterable[CodeType]]) -> None:
        """Raise where code of opened modules names something that such a tensor has, and a plain one has not.

        Args:
            codes: returns the code that may have run.

        Raises:
            Untraceable: it does.
        """
        for code in codes() if self._names else ():
            # Code that asks by a text, or catches the error of a missing attribute, goes another way in a trace.
            named = names_in(code) if code.co_exceptiontable else names_in(code) - self._left_none
            found = sorted(self._names.keys() & (named | texts_in(code)))
            if found:
                raise _refusal(self._names[found[0]], f"{code.co_qualname} names '{found[0]}'")
            if self._asked_class and asks_for_kind_of_variable(code):
                raise _refusal(self._asked_class, f"{code.co_qualname} asks for the type of a variable")

    def explain(self, error: BaseException) -> None:
        """Raise another error in the place of one of forward that such an attribute is missing."""
        name = getattr(error, "name", None)
        if isinstance(error, AttributeError) and not isinstance(error, FeatxError) and name in self._names:
            raise _refusal(self._names[name], f"forward reads '{name}'") from error


def _refusal(what: str, code: str) -> Untraceable:
    return Untraceable(f"{what}, where a trace has a plain tensor, and {code},", advice=_ADVICE)
