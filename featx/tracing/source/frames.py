"""Read, from Python's own frames, where the model is."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import zlib
from types import CodeType, FrameType

import torch
import torch.overrides

import featx.errors
from featx.tracing.source.location import position_of

# A file, and a line of it.
Line = tuple[str, int]
_OWN_FOLDERS = (
    os.path.dirname(featx.errors.__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
)
# Code between a call of torch and its handler: what such a function returns is what the handler returns.
_DISPATCHING = (
    _OWN_FOLDERS[0],
    torch.overrides.__file__,
    torch.functional.__file__,
    torch.Tensor.split.__code__.co_filename,
)
_FILES_OF_NUMBERS = (os.path.join("guards", "scalars.py"), os.path.join("recording", "numbers.py"))
_FROZEN = "<frozen "
_PYTHON_FOLDER = os.path.dirname(os.__file__) + os.sep


def is_library_code(code: CodeType) -> bool:
    """Say whether `code` belongs to featx, torch or Python itself, rather than to a model."""
    return _is_library(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_library(name: str) -> bool:
    return name.startswith(_OWN_FOLDERS) or _is_of_python(name)


def is_of_python(code: CodeType) -> bool:
    """Say whether `code` belongs to Python's own library."""
    return _is_of_python(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_of_python(name: str) -> bool:
    if name.startswith(_FROZEN):  # the files of importlib, os, abc and others of which Python is made
        return name.removeprefix(_FROZEN).rstrip(">").partition(".")[0] in sys.stdlib_module_names
    return name.startswith(_PYTHON_FOLDER) and "-packages" not in name


def is_of_featx(code: CodeType) -> bool:
    """Say whether `code` is featx's own."""
    return code.co_filename.startswith(_OWN_FOLDERS[0])


def comes_from_featx(error: BaseException) -> bool:
    """Say whether the innermost Python code in the traceback of `error` is featx's own.

    What torch raises in C has no frame, so that this tells nothing of errors that it may raise.
    """
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and is_of_featx(innermost.tb_frame.f_code)


def user_frame() -> FrameType | None:
    """Return the innermost frame outside featx's tracing and torch: the line of the model that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_code(frame.f_code):
        frame = frame.f_back
    return frame


def site_of(frame: FrameType | None) -> int:
    """Return a number for the place of a call in a model's code: the line that `frame` runs, and those of its callers.

    Callers count up to the one that torch or featx has called, as they do for each module. The number is the same in
    each process, wherever the files of the model are.
    """
    place = 0
    while frame is not None and not is_library_code(frame.f_code):
        code = frame.f_code
        place = zlib.crc32(f"{code.co_qualname}:{frame.f_lineno - code.co_firstlineno}".encode(), place)
        frame = frame.f_back
    return place


def user_of_number() -> FrameType:
    """Return the frame of the code that has called a method of a traced number: of a model, or of featx."""
    frame: FrameType = sys._getframe(1)
    while frame.f_code.co_filename.endswith(_FILES_OF_NUMBERS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def calls_directly(frame: FrameType) -> bool:
    """Say whether `frame` itself has called torch, so that it, and no library code, gets what the trace returns."""
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        if not inner.f_code.co_filename.startswith(_DISPATCHING):
            return False
        inner = inner.f_back
    return inner is frame


def line_of(frame: FrameType | None) -> Line | None:
    """Return the file of a frame, and its line."""
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def describe(frame: FrameType | None) -> str:
    """Say where `frame` is and quote the expression there."""
    if frame is None:
        return "at an unknown line"
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    expression = line.strip()
    first, last, start, end = position_of(frame.f_code, frame.f_lasti)
    if first == last == frame.f_lineno and start is not None and end is not None:
        expression = f"{line[start:end]}` in `{line.strip()}" if line[start:end] != line.strip() else line.strip()
    return f"at {place}: `{expression}`" if expression else f"at {place}"
