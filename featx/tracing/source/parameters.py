"""The parameters of a function, by place and name."""

from __future__ import annotations

import ast

from featx.tracing.source.location import Function


class Parameters:
    """The names of the parameters of a function.

    Attributes:
        positional: those that may be given by position, with `self`.
        named: those that may be given by name or position.
        every: all of them, also those of `*args` and `**kwargs`.
        defaults: the expressions of their defaults.
    """

    def __init__(self, definition: Function) -> None:
        arguments = definition.args
        self.positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        self.named = {*self.positional, *(each.arg for each in arguments.kwonlyargs)}
        further = (arguments.vararg, arguments.kwarg)
        self.every = {*self.named, *(each.arg for each in further if each is not None)}
        last = self.positional[len(self.positional) - len(arguments.defaults) :]
        self.defaults: dict[str, ast.expr] = dict(zip(last, arguments.defaults, strict=True))
        named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        self.defaults.update({each.arg: default for each, default in named if default is not None})
