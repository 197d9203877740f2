"""Names of files on disk, and at URLs that fsspec reads: which are images, and which fit a pattern."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
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


def pattern_root(path: str) -> str | None:
    """Return the folder in which a pattern begins, as it is written, with a slash at its end; None for no pattern.

    On disk that is the last folder on the way that exists, whatever is in its name, and at a URL what lies before the
    first star or brace. What exists is no pattern.
    """
    if is_url(path):
        mark = _MARKS_IN_URLS.search(path)
        return None if mark is None else path[: path.rfind("/", 0, mark.start()) + 1]
    if os.path.exists(path):
        return None
    end = 0
    while (slash := path.find("/", end)) >= 0 and os.path.isdir(path[: slash + 1]):
        end = slash + 1
    return path[:end] if _MARKS.search(path, end) else None


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


def matching(pattern: str) -> tuple[str, list[str]]:
    """Return a folder and the paths below it for which a pattern stands, each once and in order.

    A pattern is `data-{000..099}.tar`, `data-*.tar` or `photos/**/*.jpg`, on disk or at a URL. Two stars go down
    through all folders, but not through links to folders, which may lead back. What is no pattern stands for itself.

    Raises:
        ExtractionError: no file fits.
        MissingExtraError: braceexpand is not installed, or fsspec for URLs.
    """
    root = pattern_root(pattern)
    if root is None:
        _require_present(pattern)
        return "", [pattern]
    if is_url(pattern) and "::" in pattern:
        raise ExtractionError(f"'{pattern}' is a pattern inside of another file; unpack that, or list its paths")
    found: dict[str, None] = {}
    for each in _without_braces(pattern, pattern[len(root) :].lstrip("/")):
        is_pattern = (_MARKS_IN_URLS if is_url(pattern) else _MARKS).search(each)
        found.update(dict.fromkeys(_fitting(pattern, root, each) if is_pattern else [each]))
    if not found:
        raise ExtractionError(f"no file fits the pattern '{pattern}'; check its folder and its ending")
    _require_present(root + next(iter(found)))
    return root, list(found)


def _require_present(path: str) -> None:
    if not is_url(path) and not os.path.exists(path):
        raise ExtractionError(f"there is no '{path}'")


def _without_braces(pattern: str, inside: str) -> list[str]:
    if "{" not in inside:
        return [inside]
    braceexpand = require("braceexpand", "braceexpand reads patterns with braces")
    try:
        return list(braceexpand.braceexpand(inside))
    except braceexpand.UnbalancedBracesError as error:
        raise ExtractionError(f"'{pattern}' cannot be read as a pattern: {error}") from error


def _fitting(pattern: str, root: str, inside: str) -> list[str]:
    """Return the paths of files below a folder that fit what follows it in a pattern."""
    if is_url(pattern):
        with told_of_url(pattern):
            files, folder = require("fsspec", "fsspec reads URLs").core.url_to_fs(root)
            found = [each for each in files.glob(f"{folder.rstrip('/')}/{inside}") if not files.isdir(each)]
            return sorted(each[each.index(folder) + len(folder) :].lstrip("/") for each in found)
    below = f"{inside}/*" if inside.endswith("**") else inside
    try:
        paths = [path for path in Path(root).glob(below) if not path.is_dir()]
    except ValueError as error:
        raise ExtractionError(f"'{pattern}' cannot be read as a pattern: {error}") from error
    return sorted(path.relative_to(root or ".").as_posix() for path in paths)


def without_folder(paths: Sequence[str], root: str, folder: str | None) -> Sequence[str]:
    """Return paths below `root` without those below a folder that lies in it; both are on disk, or URLs."""
    if folder is None or is_url(root) != is_url(folder):
        return paths
    if not is_url(root):
        root, folder = (os.path.realpath(each).replace(os.sep, "/") for each in (root, folder))
    start = f"{root.rstrip('/')}/"
    if not folder.startswith(start):
        return paths
    inside = f"{folder[len(start) :].rstrip('/')}/"
    return [path for path in paths if not path.startswith(inside)]


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
