"""Read, from Python's own frames, where the model is and what it is doing with a traced value."""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
from itertools import islice
from types import CodeType, FrameType
from typing import Any, cast

import torch

import featx.errors
from featx.errors import TraceError

_OWN_FOLDERS = (
    os.path.dirname(featx.errors.__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
)
# What answers `isinstance(x, nn.Parameter)`, in Python and for its caller.
_PARAMETER_CHECK = type(torch.nn.Parameter).__instancecheck__.__code__
_PYTHON_FOLDER = os.path.dirname(os.__file__) + os.sep
_UNPACK_SEQUENCE = dis.opmap["UNPACK_SEQUENCE"]
_IS_OP = dis.opmap["IS_OP"]
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
# What stands between a number in a text and the call that takes the text.
_IN_A_MESSAGE = ("LOAD_", "FORMAT_", "CONVERT_", "BUILD_", "BINARY_OP", "TO_BOOL", "COPY", "PUSH_NULL")
# By the argument of BINARY_OP.
BINARY_OPERATORS = [symbol for _, symbol in cast(Any, dis)._nb_ops]
# The last version of Python whose bytecode all this was tested with.
_LATEST = (3, 13)
_ASSERTION_LOADS = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def require_known_bytecode() -> None:
    """Refuse a Python that is newer than those that are tested, whose bytecode may have other names.

    Raises:
        TraceError: it is.
    """
    if sys.version_info[:2] > _LATEST:
        tested, present = (".".join(map(str, version)) for version in (_LATEST, sys.version_info[:2]))
        raise TraceError(
            f"a trace reads what the code of the model asks for from Python's bytecode, which featx knows up to Python "
            f"{tested}, and this is {present}; run it with Python 3.11 to {tested}, or with a newer featx"
        )


def unpacked_count(frame: FrameType) -> int | None:
    """Return n where `frame` is at the unpacking of a value into n names, `a, b = value`, and None elsewhere."""
    code, position = frame.f_code.co_code, frame.f_lasti
    if position < 0 or code[position] != _UNPACK_SEQUENCE:
        return None
    count = code[position + 1]
    shift = 8
    while position >= 2 and code[position - 2] == _EXTENDED_ARG:
        position -= 2
        count |= code[position + 1] << shift
        shift += 8
    return count


def is_assertion(frame: FrameType) -> bool:
    """Say whether `frame` asks for a truth value because of `assert value`."""
    following = (
        instruction.opname
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset >= frame.f_lasti and instruction.opname not in ("CACHE", "EXTENDED_ARG", "NOT_TAKEN")
    )
    names = list(islice(following, 3))
    if names[0] in ("TO_BOOL", "COMPARE_OP"):  # Python 3.13 asks in an instruction of its own, or where it compares
        names = names[1:]
    jumps = "IF_TRUE" in names[0]
    return jumps and len(names) > 1 and names[1] in _ASSERTION_LOADS


def is_type_question(frame: FrameType) -> bool:
    """Say whether model code at `frame` asks for the type of a value, and branches on the answer.

    That is a call of the builtin `isinstance`, told from other calls in the same function by its position in the
    source; `torch.is_tensor`, `case torch.Tensor():` and functools.singledispatch ask the same.
    """
    code = frame.f_code
    if code is _PARAMETER_CHECK and frame.f_back is not None:
        return is_type_question(frame.f_back)
    if code is torch.is_tensor.__code__ or (code.co_filename == functools.__file__ and "dispatch" in code.co_freevars):
        return True
    if is_library_code(code):
        return False
    if frame.f_lasti >= 0 and code.co_code[frame.f_lasti] == _MATCH_CLASS:
        return True
    if "isinstance" not in code.co_names:
        return False
    loads = [item for item in dis.get_instructions(code) if item.argval == "isinstance" and item.offset < frame.f_lasti]
    if not loads:
        return False
    start = _position_of(code, frame.f_lasti)[:2]
    return any(_position_of(code, load.offset)[:2] == start for load in loads)


def is_library_code(code: CodeType) -> bool:
    """Say whether `code` belongs to featx, torch or Python itself, rather than to a model."""
    return _is_library(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_library(name: str) -> bool:
    return name.startswith(_OWN_FOLDERS) or (name.startswith(_PYTHON_FOLDER) and "-packages" not in name)


def user_frame() -> FrameType | None:
    """Return the innermost frame outside featx's tracing and torch: the line of the model that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_code(frame.f_code):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Return the code of a frame, and its line."""
    return None if frame is None else (frame.f_code, frame.f_lineno)


def describe(frame: FrameType | None) -> str:
    """Say where `frame` is and quote the expression there."""
    if frame is None:
        return "at an unknown line"
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    expression = line.strip()
    first, start, last, end = _position_of(frame.f_code, frame.f_lasti)
    if first == last == frame.f_lineno and start is not None and end is not None:
        expression = f"{line[start:end]}` in `{line.strip()}" if line[start:end] != line.strip() else line.strip()
    return f"at {place}: `{expression}`" if expression else f"at {place}"


def _position_of(code: CodeType, offset: int) -> tuple[int | None, int | None, int | None, int | None]:
    first, last, start, end = next(islice(cast(Any, code).co_positions(), offset // 2, None))
    return first, start, last, end


def written_operator(frame: FrameType) -> str | None:
    """Return the binary operator that `frame` is at (`"+"`, `"+="`), or None where it is at something else."""
    code, position = frame.f_code.co_code, frame.f_lasti
    if position < 0:
        return None
    return BINARY_OPERATORS[code[position + 1]] if dis.opname[code[position]] == "BINARY_OP" else None


def written_sign(frame: FrameType) -> str | None:
    """Return the sign that `frame` puts ahead of a value, `-x` or `+x`, or None where it is at something else."""
    position = frame.f_lasti
    name = dis.opname[frame.f_code.co_code[position]] if position >= 0 else ""
    # Python 3.12 writes `+x` as a call of a function of its own.
    return {"UNARY_NEGATIVE": "-", "UNARY_POSITIVE": "+", "CALL_INTRINSIC_1": "+"}.get(name)


def is_comparison(frame: FrameType) -> bool:
    """Say whether `frame` is at a comparison that the model writes out, `a == b`, and not at a call that makes one."""
    position = frame.f_lasti
    return position >= 0 and dis.opname[frame.f_code.co_code[position]] == "COMPARE_OP"


def what_follows(frame: FrameType) -> list[int | slice | str]:
    """Return what `frame` does next with the value that it is about to get, as far as its code says so plainly.

    A number or slice is an item that is taken, `"unpack 3"` an unpacking into three names, `"attribute type"` a read;
    what is read of an item does not count, but for `numel` of a slice of sizes.
    """
    code, constants = frame.f_code.co_code, frame.f_code.co_consts
    position = frame.f_lasti + 2
    found: list[int | slice | str] = []
    stack: list[Any] = []
    while position < len(code) - 1:
        name, argument = dis.opname[code[position]], code[position + 1]
        position += 2
        if name == "CACHE":
            continue
        if name == "LOAD_CONST":
            stack.append(constants[argument])
        elif name == "BUILD_SLICE" and len(stack) >= argument:
            parts = [stack.pop() for _ in range(argument)][::-1]
            stack.append(slice(*parts))
        elif name == "UNARY_NEGATIVE" and stack:
            stack.append(-stack.pop())
        elif name in ("BINARY_SUBSCR", "BINARY_SLICE") and stack:
            if name == "BINARY_SLICE":
                stack = [slice(*stack[-2:])]
            key = stack.pop()
            if not isinstance(key, (int, slice)):
                return found
            found.append(key)
        elif name == "UNPACK_SEQUENCE" and not stack:
            return [*found, f"unpack {argument}"]
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and not stack:
            if sys.version_info >= (3, 12) and name == "LOAD_ATTR":
                argument >>= 1
            attribute = frame.f_code.co_names[argument]
            return [*found, f"attribute {attribute}"] if not found or attribute == "numel" else found
        elif name in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
            return [*found, "compare"]
        else:
            return found
    return found


def writes_a_message(frame: FrameType) -> bool:
    """Say whether the text that `frame` makes goes into a call whose result nobody takes, or into an error.

    `torch._assert(ok, f"{n}")`, `print(n)`, `logger.info(...)`, `raise ValueError(f"{n}")`: and not `heads[str(n)]`.
    """
    return _message_follows(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _message_follows(code: CodeType, offset: int) -> bool:
    instructions = [item for item in dis.get_instructions(code) if item.offset > offset]
    height, arguments = 1, 0  # of the stack above and with the text; what the next call takes from it
    for position, item in enumerate(instructions[:-1]):
        name, effect = item.opname, dis.stack_effect(item.opcode, item.arg, jump=False)
        if name == "PRECALL":
            arguments = effect
            continue
        height += effect + arguments
        arguments = 0
        if height > 1:  # beside the text, for something else in the same expression
            continue
        if name.startswith("CALL"):
            return instructions[position + 1].opname in ("POP_TOP", "RAISE_VARARGS")
        if not name.startswith(_IN_A_MESSAGE):
            return False
        height = 1
    return False


def compares_objects(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, has an `a is b` of two variables anywhere, or asks for an `id`."""
    if "id" in code.co_names or any(compares_objects(each) for each in code.co_consts if isinstance(each, CodeType)):
        return True
    operations = code.co_code[::2]
    position = operations.find(_IS_OP)
    while position >= 0:
        before = position - 1
        while before > 0 and dis.opname[operations[before]] in ("CACHE", "EXTENDED_ARG"):
            before -= 1
        if dis.opname[operations[before]].startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR")):
            return True
        position = operations.find(_IS_OP, position + 1)
    return False


def is_in_try(frame: FrameType) -> bool:
    """Say whether `frame` is at code of a `try` with an `except` that goes on."""
    code = frame.f_code
    if not code.co_exceptiontable:
        return False
    entries: list[Any] = cast(Any, dis)._parse_exception_table(code)
    return any(entry.start <= frame.f_lasti < entry.end and _catches(code, entry.target) for entry in entries)


def _catches(code: CodeType, target: int) -> bool:
    # The handler of a `with` asks its context, that of a `finally` raises again, that of an `except` compares classes.
    opcodes = (dis.opname[code.co_code[position]] for position in range(target, len(code.co_code), 2))
    names = [name for name in opcodes if name not in ("CACHE", "EXTENDED_ARG")]
    if names[:1] != ["PUSH_EXC_INFO"]:
        return False
    if names[1:2] == ["WITH_EXCEPT_START"]:
        return "suppress" in code.co_names  # contextlib.suppress catches, other contexts hardly ever do
    return (names[1:2] == ["POP_TOP"] or "CHECK_EXC_MATCH" in names[1:9]) and not _only_raises(names)


def _only_raises(names: list[str]) -> bool:
    # A handler that comes to its end forgets the error, and so does the code for an error inside it, which stands last.
    for position, name in enumerate(names[1:-1], 1):
        if name == "PUSH_EXC_INFO":  # another one, inside it
            return False
        if name == "POP_EXCEPT":
            return names[position + 1] == "RERAISE"
    return False
