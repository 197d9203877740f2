"""What stands in a pattern for any constant, or for any one of several operations or constants."""

from __future__ import annotations

from typing import Any

from featx.errors import ArgumentTypeError
from featx.tracing.nodes.proxy import find_proxy


class Wildcard:
    """An argument that torch's argument parsers let pass and that every tracer of featx records as it is."""

    def __fx_create_arg__(self, tracer: object) -> Wildcard:
        return self

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:  # Any: NotImplemented is no type
        return NotImplemented


class AnyConstant(Wildcard):
    """The class of `ANY`."""

    def __repr__(self) -> str:
        return "ANY"


# In the arguments of a pattern: any value in which there is no node. (An input of the pattern stands for such values
# too, and hands them to the replacement.)
ANY = AnyConstant()


class AnyOf(Wildcard):
    """One of several operations, or one of several constants, in a pattern.

    Called in a pattern, as in `AnyOf(torch.relu, functional.relu, "relu", nn.ReLU)(x)`, it stands for a call of one of
    those functions, methods (by name) or modules (by class). As an argument, as in `x.sum(AnyOf(1, -1))`, it stands
    for one of those constants.

    Raises:
        ArgumentTypeError: there is no choice, or it is called on real values.
    """

    def __init__(self, *choices: Any) -> None:  # Any: a function, a name, a class, or a constant of any type
        if not choices:
            raise ArgumentTypeError("AnyOf needs at least one operation or constant to choose from")
        self.choices = choices
        self.__name__ = "any_of"  # what nodes that call it are named after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - magic
        proxy = find_proxy((args, kwargs))
        if proxy is None:
            raise ArgumentTypeError(f"{self!r} stands for an operation in a pattern, and cannot run on real values")
        return proxy.tracer.create_proxy("call_function", self, args, kwargs)

    def __repr__(self) -> str:
        names = [getattr(choice, "__name__", None) or repr(choice) for choice in self.choices]
        return f"AnyOf({', '.join(names)})"
