"""Sources of samples: folders of images, lists and tables of paths, tars, data sets. Each sample has a key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, cast

from featx.bulk.extras import require
from featx.bulk.samples.lists import IMAGE_COLUMNS, LISTS, PATH_COLUMNS, read_list, refuse_column, values_of
from featx.bulk.samples.tars import find_members
from featx.bulk.storage.files import (
    SUFFIXES,
    is_url,
    matching,
    opened,
    pattern_root,
    samples_among,
    told_of_url,
    without_folder,
)  # fmt: skip
from featx.errors import ArgumentTypeError, ExtractionError

_FORMS = (
    "a folder of images or the URL of one, a pattern such as photos/**/*.jpg, a list of paths or URLs, a .txt, .csv or "
    ".parquet file of them, .tar files of webdataset or a pattern for them, a column of pandas, polars or numpy, a "
    "data set of Hugging Face, a torch Dataset with a length, or a list or array of images"
)


class Source(Protocol):
    """Samples with keys, which `load` or a decoder turns into what the model takes."""

    @property
    def keys(self) -> Sequence[str]:
        """One for each sample, all different."""
        ...

    @property
    def kind(self) -> str:
        """What it is, in words."""
        ...

    def item(self, index: int) -> Any:
        """Return what is read of a sample: a path, a file, an image or a row. It runs in a process of its own."""
        ...


# A column that may have texts or paths has texts if so many of the first ones are no files.
_TEXTS_TO_LOOK_AT = 8


@dataclass(frozen=True)
class Paths:
    """Files on disk, or at URLs that fsspec reads."""

    keys: Sequence[str]
    kind: str
    root: str = ""

    def has_file(self, index: int) -> bool:
        """Say whether a key is a URL, or the path of a file that is there."""
        path = self._path(index)
        return (is_url(path) and " " not in path) or os.path.isfile(path)  # a text may begin with a URL

    def is_misplaced(self, index: int) -> bool:
        """Say whether a path is not there below the root, and is below the working directory."""
        return not os.path.exists(self._path(index)) and os.path.exists(self.keys[index])

    def _path(self, index: int) -> str:
        key = self.keys[index]
        return key if is_url(key) else os.path.join(self.root, key)

    def item(self, index: int) -> Any:
        """Return the path, or the open file of a URL."""
        path = self._path(index)
        if not is_url(path):
            return path
        with opened(path) as file:
            return BytesIO(file.read())


@dataclass(frozen=True)
class Rows:
    """A data set that gives samples by number: of torch, or of Hugging Face."""

    keys: Sequence[str]
    kind: str
    dataset: Any
    column: str | None
    has_tokens: bool = False

    def item(self, index: int) -> Any:
        """Return the sample as the data set gives it, or a column of one that is a dict."""
        sample = self.dataset[index]
        if isinstance(sample, dict) and self.column is not None:
            return cast("dict[str, Any]", sample)[self.column]
        return sample

    def starts_with_tokens(self) -> bool:
        """Say whether the first sample is a dict of a tokenized text, which it reads."""
        try:
            first = self.item(0)
            first = first[0] if isinstance(first, (tuple, list)) else first
        except Exception:  # it becomes a failure when it is its turn
            return False
        return isinstance(first, dict) and "input_ids" in first


def find_source(source: Any, column: str | None = None, *, has_load: bool = False, output: str | None = None) -> Source:
    """Return the samples of what a user names.

    Args:
        source: a folder, a file, a list or a data set.
        column: of a table or a data set, the column that has paths or images.
        has_load: whether a function of the user's makes an input of an item. It gets the texts of a column as they are,
            and keys are the numbers of the rows, if the column is named, its name is not a usual one for paths, and the
            first texts, eight at most, are neither files nor URLs.
        output: the folder or URL of the features; where it lies in the source, its files are no samples.

    Raises:
        ArgumentTypeError: it is nothing of what is known.
        ExtractionError: it does not exist, is empty, or gives one key to two samples.
    """
    if isinstance(source, (set, frozenset)):
        raise ArgumentTypeError("a set of samples has no order, and a job that goes on needs one; give sorted(samples)")
    found = _source(source, column, has_load=has_load, output=output)
    if not found.keys:
        hint = (
            "; load=..., a function that makes an input of a file, takes those"
            if found.kind.endswith("left out)")
            else ""
        )
        raise ExtractionError(f"there is nothing to extract in {found.kind}{hint}")
    may_have_texts = has_load and column not in (None, *PATH_COLUMNS)
    if may_have_texts and isinstance(found, Paths) and not _are_files(found):
        return Rows([str(number) for number in range(len(found.keys))], found.kind, found.keys, None)
    first: dict[str, int] = {}
    for place, key in enumerate(found.keys):
        if first.setdefault(key, place) != place:
            are_texts = has_load and isinstance(found, Paths)
            hint = ". If these are texts, give a table and column=..., whose keys are numbers" if are_texts else ""
            raise ExtractionError(
                f"the key '{key}' stands for two samples of {found.kind}, number {first[key]} and number {place}; "
                f"leave one of them out{hint}"
            )
        if not key.isascii() and any("\udc80" <= each <= "\udcff" for each in key):
            raise ExtractionError(f"the name {os.fsencode(key)!r} in {found.kind} is not UTF-8; rename that file")
    return found


def _are_files(found: Paths) -> bool:
    """Say whether the first texts of a column are files or URLs.

    Raises:
        ExtractionError: some of them are, and others are not.
    """
    places = range(min(len(found.keys), _TEXTS_TO_LOOK_AT))
    are_there = [found.has_file(place) for place in places]
    if any(are_there) and not all(are_there):
        raise ExtractionError(
            f"of the first texts in {found.kind}, '{found.keys[are_there.index(True)]}' is a file that is there, and "
            f"'{found.keys[are_there.index(False)]}' is none; name the column 'path' if all are paths"
        )
    return all(are_there)


def _source(source: Any, column: str | None, *, has_load: bool, output: str | None = None) -> Source:
    if isinstance(source, (str, os.PathLike)):
        path = os.path.expanduser(os.fspath(cast("str | os.PathLike[str]", source)))
        return _of_path(path, column, has_load=has_load, output=output)
    values = values_of(source, column)
    if values is not None:
        return _source(values, None, has_load=has_load)
    if type(source).__name__ == "DataLoader" and hasattr(source, "dataset"):
        raise ArgumentTypeError("a DataLoader gives batches, in an order of its own; give loader.dataset")
    is_list = isinstance(source, (list, tuple))
    if is_list and any(map(_is_path, cast("Sequence[Any]", source))):
        return _of_list(cast("Sequence[Any]", source), column, has_load=has_load)
    is_mapping = isinstance(source, (bytes, dict)) and not hasattr(source, "column_names")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not is_mapping:
        return _of_dataset(source, column, has_load=has_load)
    if isinstance(source, Iterable) and not is_mapping:
        return _of_list(cast("Iterable[Any]", source), column, has_load=has_load)
    raise ArgumentTypeError(f"samples come from {_FORMS}; got a {type(source).__name__}")


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _of_list(source: Iterable[Any], column: str | None, *, has_load: bool) -> Source:
    kind = type(source).__name__
    keys: list[str] = []
    for number, each in enumerate(source):
        if _is_path(each):
            keys.append(os.fspath(each))
        elif number == 0:
            raise ArgumentTypeError(
                f"samples need numbers or paths, and a {kind} of {type(each).__name__} has none; samples come from "
                f"{_FORMS}"
            )
        else:
            raise ExtractionError(f"item {number} of the {kind} is {each!r:.60}, and no path or URL; take it out")
    refuse_column(column, "a list of paths")
    if keys and all(key.endswith(".tar") for key in keys):
        return find_members(keys, has_load=has_load)
    return Paths(keys, f"a list of {len(keys)} paths")


def _of_path(path: str, column: str | None, *, has_load: bool, output: str | None) -> Source:
    if not path:
        raise ArgumentTypeError("the source is an empty text; give '.' for the current folder")
    if path.lower().endswith(".tar") and not os.path.isdir(path):
        refuse_column(column, f"the tar file '{path}'")
        root, found = matching(path)
        return find_members([root + each for each in found], has_load=has_load)
    if pattern_root(path) is not None:
        refuse_column(column, f"the pattern '{path}'")
        return _of_pattern(path, has_load=has_load, output=output)
    if is_url(path):
        return _of_url(path.rstrip("/"), column, has_load=has_load, output=output)
    place = Path(path)
    if not place.exists():
        raise ExtractionError(f"there is no '{path}'; samples come from {_FORMS}")
    if place.is_dir():
        if (place / "dataset_info.json").exists() or (place / "dataset_dict.json").exists():
            dataset = require("datasets", "datasets reads its own folders").load_from_disk(path)
            return _of_dataset(dataset, column, has_load=has_load)
        refuse_column(column, f"the folder '{path}'")
        return _of_folder(place, has_load=has_load, output=output)
    suffix = place.suffix.lower()
    if suffix in LISTS:
        return Paths(read_list(path, place.read_bytes(), column), f"the list '{path}'", str(place.parent))
    if suffix in SUFFIXES:
        return Paths([place.name], f"the image '{path}'", str(place.parent))
    raise ExtractionError(f"'{path}' is no list of samples; they come from {_FORMS}")


def _of_pattern(pattern: str, *, has_load: bool, output: str | None) -> Source:
    """Return the files that fit a pattern; keys are the paths below the folder in which it begins."""
    root, found = matching(pattern)
    samples, what = samples_among(without_folder(found, root, output), has_load=has_load)
    return Paths(sorted(samples), f"the pattern '{pattern}' ({what})", root)


def _of_folder(folder: Path, *, has_load: bool, output: str | None) -> Source:
    found: list[str] = []
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [each for each in sorted(folders) if not _leads_back(Path(root, each)) and each[0] != "."]
        inside = Path(root).relative_to(folder)
        found += [(inside / file).as_posix() for file in files]
    samples, what = samples_among(without_folder(found, str(folder), output), has_load=has_load)
    return Paths(sorted(samples), f"the folder '{folder}' ({what})", str(folder))


def _leads_back(folder: Path) -> bool:
    """Say whether a folder is a link to one that it lies in, on the way to it through other links too."""
    if not folder.is_symlink():
        return False
    target = folder.resolve()
    return any(around.resolve().is_relative_to(target) for around in folder.parents)


def _of_url(url: str, column: str | None, *, has_load: bool, output: str | None) -> Source:
    """Return the samples below a URL, the image there, or those of a list or table, with paths below its folder."""
    fsspec = require("fsspec", "fsspec reads URLs")
    folder, suffix = url.rpartition("/")[0], Path(url.partition("?")[0]).suffix.lower()
    with told_of_url(url):
        files, root = fsspec.core.url_to_fs(url)
        if suffix in SUFFIXES and not files.isdir(root):
            return Paths([url], f"the image '{url}'")
        if suffix in LISTS:
            with files.open(root, "rb") as file:
                keys = read_list(url, file.read(), column)
            return Paths(keys, f"the list '{url}'", folder)
        found = [each[len(root) :].lstrip("/") for each in files.find(root)]
    samples, what = samples_among(without_folder(found, url, output), has_load=has_load)
    return Paths(sorted(samples), f"the folder '{url}' ({what})", url)


def _of_dataset(dataset: Any, column: str | None, *, has_load: bool) -> Source:
    columns: list[str] | None = getattr(dataset, "column_names", None)
    if isinstance(columns, dict):
        splits = ", ".join(cast("dict[str, Any]", columns))
        first = next(iter(cast("dict[str, Any]", columns)))
        raise ExtractionError(
            f"the data set has the splits {splits}; give one of them: dataset['{first}'], or the folder '.../{first}'"
        )
    if columns is not None and getattr(dataset, "format", {}).get("type") == "custom":  # by `with_transform`
        columns = list(dataset[0])
    if columns is not None and column is None:
        is_tokenized = "input_ids" in columns  # of which a row is an input
        usual = () if is_tokenized else (*IMAGE_COLUMNS, "text")
        column = next((each for each in usual if each in columns), None)
        if column is None and not is_tokenized and not has_load:
            raise ExtractionError(
                f"the data set has the columns {', '.join(columns)}; say which one, by column=..., or make an input of "
                "a row, by load=..."
            )
    if columns is not None and column is not None and column not in columns:
        raise ExtractionError(f"the data set has no column '{column}'; its columns are {', '.join(columns)}")
    kind = f"a {type(dataset).__name__} of {len(dataset)} samples"
    has_tokens = column is None and columns is not None and "input_ids" in columns
    return Rows([str(place) for place in range(len(dataset))], kind, dataset, column, has_tokens)
