"""Names of files on disk, and at URLs that fsspec reads: which are images, and which fit a pattern."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from featx.bulk.extras import require
from featx.errors import ExtractionError, MissingExtraError

# What Pillow, or a plugin of it, decodes.
SUFFIXES = frozenset(
    {
        ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
        ".pnm", ".jp2", ".j2k", ".avif", ".heic", ".heif", ".tga",
    }
)  # fmt: skip
# Names in object stores may have spaces.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S.*")
# What begins a pattern in a path; in a URL a question mark begins a query.
_MARKS, _MARKS_IN_URLS = re.compile(r"[*?\[{]"), re.compile(r"[*{]")


def is_url(text: str) -> bool:
    """Say whether a text has the form of a URL."""
    return _URL.fullmatch(text) is not None


def ahead_of_pattern(path: str) -> str | None:
    """Return what stands ahead of the first star, question mark, bracket or brace; None where there is none.

    None also for a file on disk that has such a name.
    """
    marks = _MARKS_IN_URLS if is_url(path) else _MARKS
    found = None if not is_url(path) and os.path.exists(path) else marks.search(path)
    return None if found is None else path[: found.start()]


def opened(path: str) -> Any:
    """Return what opens a file, or what is at a URL."""
    return require("fsspec", "fsspec reads URLs").open(path, "rb") if is_url(path) else open(path, "rb")


@contextmanager
def told_of_url(url: str, action: str = "read") -> Generator[None]:
    """Tell what goes wrong in fsspec, whose file systems have errors of their own, as one that names the URL.

    Raises:
        ExtractionError: so it is.
    """
    try:
        yield
    except (MissingExtraError, FileExistsError):
        raise
    except Exception as error:
        is_absent = isinstance(error, FileNotFoundError)
        hint = "; check the address, and that the bucket or folder exists" if is_absent else ""
        raise ExtractionError(f"'{url}' cannot be {action}: {type(error).__name__}: {error}{hint}") from error


def matching(pattern: str) -> list[str]:
    """Return the paths or URLs that a pattern stands for: `data-{000..099}.tar`, `data-*.tar`, `photos/**/*.jpg`.

    What is no pattern stands for itself.

    Raises:
        ExtractionError: no file fits.
        MissingExtraError: braceexpand is not installed, or fsspec for URLs.
    """
    if ahead_of_pattern(pattern) is None:
        return _present(pattern)
    paths = [pattern]
    if "{" in pattern:
        braceexpand = require("braceexpand", "braceexpand reads patterns with braces")
        try:
            paths = list(braceexpand.braceexpand(pattern))
        except braceexpand.UnbalancedBracesError as error:
            raise ExtractionError(f"'{pattern}' cannot be read as a pattern: {error}") from error
    if ahead_of_pattern(paths[0]) is not None:
        paths = list(dict.fromkeys(path for each in paths for path in _fitting(each)))
        if not paths:
            raise ExtractionError(f"no file fits the pattern '{pattern}'; check its folder and its ending")
    return [*_present(paths[0]), *paths[1:]]


def _present(path: str) -> list[str]:
    if not is_url(path) and not os.path.exists(path):
        raise ExtractionError(f"there is no '{path}'")
    return [path]


def _fitting(pattern: str) -> list[str]:
    """Return the files on disk, or at a URL, that fit a pattern with stars."""
    if not is_url(pattern):
        return sorted(path for path in glob(pattern, recursive=True) if not os.path.isdir(path))
    with told_of_url(pattern):
        files, path = require("fsspec", "fsspec reads URLs").core.url_to_fs(pattern)
        return [files.unstrip_protocol(each) for each in sorted(files.glob(path)) if not files.isdir(each)]


def samples_among(paths: Sequence[str], *, has_load: bool) -> tuple[list[str], str]:
    """Return the paths of images, and how many they are, in words.

    Where `load` makes the inputs and there is no image, as in a folder of videos, they are those of all files. Hidden
    ones, such as `._cat.jpg`, are left out.
    """
    shown = [path for path in paths if path and not _is_hidden(path)]
    images = [path for path in shown if Path(path).suffix.lower() in SUFFIXES]
    samples, kind = (images, "images") if images or not has_load else (shown, "files")
    others = len(paths) - len(samples)
    return samples, f"{len(samples)} {kind}" + (f", {others} other files left out" if others else "")


def _is_hidden(path: str) -> bool:
    return any(part[0] == "." and part != ".." for part in Path(path).parts)
