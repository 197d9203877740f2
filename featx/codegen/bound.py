"""A property of an instance that is a plain function where it is read from the class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from featx.errors import ArgumentTypeError


class InstanceForward(property):
    """The forward function of a graph module, which each instance has of its own.

    Read from the class it is a function that calls the instance's. torch.fx reads it there and calls it with proxies.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the instance's function, or one that looks for it."""
        # Dynamo traces this, and has no super() of a property.
        return forward_of_instance if instance is None else cast(Callable[[Any], Any], self.fget)(instance)


def forward_of_instance(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward function of `self`.

    Raises:
        ArgumentTypeError: torch.fx traces it.
    """
    if not isinstance(args, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] - torch.fx has a proxy for all
        raise ArgumentTypeError(
            f"torch.fx, and prepare_fx of torch.ao.quantization, cannot trace a featx {type(self).__name__}; give them "
            "featx.to_torch_fx(module)"
        )
    return self.forward(*args, **kwargs)
