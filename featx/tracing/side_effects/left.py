"""What a call of a model leaves outside of its result, where a later call may find it."""

from __future__ import annotations

from dataclasses import dataclass

# Characters of what is left that a message shows.
_LONGEST = 80


@dataclass(frozen=True, order=True)
class Left:
    """A place in which a call has left what it has computed.

    Attributes:
        path: of the module that has it; "" for the root, and for what is in no module.
        text: the place, with a key or a constant after the name: `kept['mask']`, `mode = 'fast'`. Calls that leave
            another constant there are to be told apart.
        name: the name of the attribute; "" where it is none, such as a global of the model's Python file.
        is_for_one_length: whether it is a cache that later calls with another length would use.
    """

    path: str
    text: str
    name: str = ""
    is_for_one_length: bool = False

    @property
    def attribute(self) -> tuple[str, str]:
        """The path of the module and the name of the attribute; for what is none, its text in place of a name."""
        return self.path, self.name or self.text

    def __str__(self) -> str:
        if self.text == self.name:
            return f"the attribute '{'.'.join(filter(None, (self.path, self.name)))}'"
        return self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}..."
