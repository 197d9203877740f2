"""What is known of other lengths of a dimension of an input."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from featx.tracing.environment.raised_errors import first_line
from featx.tracing.source.location import node_at

# Each process has other ones, and texts are in graphs.
_NUMBER = re.compile(r"\d+")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class Outcome:
    """What runs at other lengths have shown of a dimension.

    Attributes:
        text: says it to the user.
        is_free: the graph holds at other lengths.
        is_refusal: the model raised an error at the other length.
        is_assertion: that error was an assertion, which as a rule wants one length.
        is_raised: a statement of the model has raised that error, `raise` or `assert`.
        said: the text of that error.
        tied: where it is not 0, the graph holds only if all dimensions with this number have one length.
    """

    text: str
    is_free: bool = False
    is_refusal: bool = False
    is_assertion: bool = False
    is_raised: bool = False
    said: str = field(default="", compare=False)
    tied: int = field(default=0, compare=False)

    def may_be(self, earlier: Outcome) -> bool:
        """Say whether the model has refused some lengths for the reason for which it refused others `earlier`."""
        texts = [_NUMBER.sub("", f"{each.text} {each.said}") for each in (self, earlier)]
        return earlier == TOO_MANY_FAILED or texts[0] == texts[1]

    def __str__(self) -> str:
        return f"{self.text[:-1]}: {self.said})" if self.said else self.text


FREE = Outcome("free", is_free=True)
# No code that was traced reads it, so that no other length was tried.
UNTRIED = Outcome("free, unless a layer refuses it", is_free=True)
# The model takes another length if all dimensions that had the same length on the example change with it.
TOGETHER = Outcome("free, with all others of this length", is_free=True)
NOT_EMPTY = Outcome("free, but not 0", is_free=True)
# The model takes some other length, and has refused one: a multiple is wanted, or the example is as long as it takes.
IF_TAKEN = Outcome("free, if the model takes that length", is_free=True)
CHANGED = Outcome("fixed: the model runs other operations, or uses other numbers, at another length")
UNTRACEABLE = Outcome("fixed: at another length the model cannot be followed")
LAYOUT_NOT_VARIED = Outcome("fixed: other sizes of a tensor with this layout are not tried")
# A trace for real takes as long as the model: not every dimension is tried alone.
NOT_ALONE = Outcome(
    "fixed: other lengths were not tried, because the model asks for values and runs for real each time"
)
TOO_MANY_FAILED = Outcome(
    "fixed: other lengths were not tried, because the model runs for real each time, and such runs have failed before"
)
ASKS_FOR_VALUES = Outcome(
    "fixed: at another length the model asks for values of tensors, unlike on the example", is_refusal=True
)
BROKE_OFF = Outcome(
    "fixed: a run at another length has failed before it came to the last requested value", is_refusal=True
)
STALE = Outcome(
    "fixed: the model keeps what it has computed for the length of its first call, and would use it at another length"
)
NOT_ASKED = Outcome("fixed: other lengths were not tried because of check_sizes")


def refusal(error: BaseException, *, uses_numpy: bool) -> Outcome:
    """Return the outcome of a run that has ended with an error of the model.

    An assertion says that the model takes no other length. Any other error may also come from C code that has read a
    number where only a trace has another one: `np.linspace(0, 1, n) / 2`.
    """
    name = type(error).__name__
    is_assertion = "Assert" in name
    is_raised = is_assertion or _is_raised_by_model(error)
    text = "the model takes no other length" if is_assertion else "a run at another length has failed"
    if uses_numpy and not is_assertion:
        text += ", perhaps because numpy computes with it, where torch.linspace and the like are followed"
    elif is_raised and not is_assertion:
        text += " because the model raises an error"
    # What an operator says of a number that only a trace has would be misleading.
    is_told = not is_assertion and (is_raised or not uses_numpy)
    said = _ADDRESS.sub("0x...", first_line(error)) if is_told else ""
    return Outcome(
        f"fixed: {text} ({name})", is_refusal=True, is_assertion=is_assertion, is_raised=is_raised, said=said
    )


def _is_raised_by_model(error: BaseException) -> bool:
    """Say whether a `raise` statement has raised an error, of code that is neither torch's nor featx's.

    Without source it is taken to have: the graph checks more then.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "featx"):
        return False
    node = node_at(place.tb_frame, place.tb_lasti)
    return node is None or isinstance(node, ast.Raise)


@dataclass
class FreeDims:
    """Which dimensions of the inputs of a trace may differ from the example.

    Attributes:
        outcomes: for each input tensor, by name (`"x"`, `"images[0]"`), what is known of each dimension.
    """

    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: dict[str, list[Outcome]]())

    @property
    def of(self) -> dict[str, list[str]]:
        """The outcomes as texts.

        "free"; "free, but not 0"; "free, if the model takes that length", where it has refused one: the frames of
        videos may have to be a multiple, or the example is as long as a table of positions; "free, with all others of
        this length", such as the nodes of a graph and both sides of its adjacency matrix; "fixed:" and why; or "free,
        unless a layer refuses it" where no code that was traced reads it, and other lengths were not tried.
        """
        return {name: [each.text for each in dims] for name, dims in self.outcomes.items()}

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {', '.join(dims)}" for name, dims in self.of.items())
