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
        self._further = arguments.vararg.arg if arguments.vararg else ""
        self._further_named = arguments.kwarg.arg if arguments.kwarg else ""
        self.every = {*self.named, self._further, self._further_named} - {""}

    def name_of(self, place: int | str | None) -> str:
        """Return the name of the parameter that holds an argument of a call; "" if none does.

        Args:
            place: the position of the argument, without `self`, or its name.
        """
        if isinstance(place, int):
            place += self.positional[:1] == ["self"]
            return self.positional[place] if place < len(self.positional) else self._further
        return place if place in self.named else self._further_named
