"""The parameters of a function, by place and name."""

from __future__ import annotations

from featx.tracing.source.location import Function


class Parameters:
    """The names of the parameters of a function.

    Attributes:
        positional: those that may be given by position, with `self`.
        named: those that may be given by name or position.
        every: all of them, also those of `*args` and `**kwargs`.
    """

    def __init__(self, definition: Function) -> None:
        arguments = definition.args
        self.positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        self.named = {*self.positional, *(each.arg for each in arguments.kwonlyargs)}
        further = (arguments.vararg, arguments.kwarg)
        self.every = {*self.named, *(each.arg for each in further if each is not None)}
