"""Sources of samples: folders of images, lists and tables of paths, tars, data sets. Each sample has a key."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, cast

from featx.bulk.extras import require
from featx.bulk.lists import IMAGE_COLUMNS, LISTS, PATH_COLUMNS, SUFFIXES, read_list, refuse_column, values_of
from featx.errors import ArgumentTypeError, ExtractionError

_FORMS = (
    "a folder of images or the URL of one, a list of paths or URLs, a .txt, .csv or .parquet file of them, .tar files "
    "of webdataset or a pattern for them, a column of pandas, polars or numpy, a data set of Hugging Face, a torch "
    "Dataset with a length, or a list or array of images"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


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


@dataclass(frozen=True)
class Paths:
    """Files on disk, or at URLs that fsspec reads."""

    keys: Sequence[str]
    kind: str
    root: str = ""

    def has_file(self, index: int) -> bool:
        """Say whether a key is a URL, or the path of a file that is there."""
        path = self._path(index)
        return _is_url(path) or os.path.exists(path)

    def _path(self, index: int) -> str:
        key = self.keys[index]
        return key if _is_url(key) else os.path.join(self.root, key)

    def item(self, index: int) -> Any:
        """Return the path, or the open file of a URL."""
        path = self._path(index)
        if not _is_url(path):
            return path
        with _opened(path) as file:
            return BytesIO(file.read())


def _is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def _opened(path: str) -> Any:
    """Return what opens a file, or what is at a URL."""
    return require("fsspec", "fsspec reads URLs").open(path, "rb") if _is_url(path) else open(path, "rb")


@dataclass(frozen=True)
class Tars:
    """Members of tar files, by the offsets at which they lie."""

    keys: Sequence[str]
    kind: str
    places: Sequence[tuple[str, int, int]]

    def item(self, index: int) -> Any:
        """Return a member as a file."""
        path, offset, size = self.places[index]
        if _is_url(path):  # a file there would read ahead
            files, inside = require("fsspec", "fsspec reads URLs").core.url_to_fs(path)
            return BytesIO(files.cat_file(inside, start=offset, end=offset + size))
        with open(path, "rb") as file:
            file.seek(offset)
            return BytesIO(file.read(size))


@dataclass(frozen=True)
class Rows:
    """A data set that gives samples by number: of torch, or of Hugging Face."""

    keys: Sequence[str]
    kind: str
    dataset: Any
    column: str | None
    has_tokens: bool = False

    def item(self, index: int) -> Any:
        """Return the sample, the first part of one that is a tuple, or a column of one that is a dict."""
        sample = self.dataset[index]
        if isinstance(sample, dict) and self.column is not None:
            return cast("dict[str, Any]", sample)[self.column]
        return cast("Sequence[Any]", sample)[0] if isinstance(sample, (tuple, list)) else sample

    def starts_with_tokens(self) -> bool:
        """Say whether the first sample is a dict of a tokenized text, which it reads."""
        try:
            first = self.item(0)
        except Exception:  # it becomes a failure when it is its turn
            return False
        return isinstance(first, dict) and "input_ids" in first


def find_source(source: Any, column: str | None = None, *, has_load: bool = False) -> Source:
    """Return the samples of what a user names.

    Args:
        source: a folder, a file, a list or a data set.
        column: of a table or a data set, the column that has paths or images.
        has_load: whether a function of the user's makes an input of an item. It gets the texts of a column as they are,
            and keys are the numbers of the rows, if the column is named, its name is not a usual one for paths, and the
            first text is neither a file nor a URL.

    Raises:
        ArgumentTypeError: it is nothing of what is known.
        ExtractionError: it does not exist, is empty, or gives one key to two samples.
    """
    if isinstance(source, (set, frozenset)):
        raise ArgumentTypeError("a set of samples has no order, and a job that goes on needs one; give sorted(samples)")
    found = _source(source, column, has_load=has_load)
    if not found.keys:
        hint = (
            "; load=..., a function that makes an input of a file, takes those"
            if found.kind.endswith("left out)")
            else ""
        )
        raise ExtractionError(f"there is nothing to extract in {found.kind}{hint}")
    may_have_texts = has_load and column not in (None, *PATH_COLUMNS)
    if may_have_texts and isinstance(found, Paths) and not found.has_file(0):
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


def _source(source: Any, column: str | None, *, has_load: bool = False) -> Source:
    if isinstance(source, (str, os.PathLike)):
        path = os.path.expanduser(os.fspath(cast("str | os.PathLike[str]", source)))
        return _of_path(path, column, has_load=has_load)
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
        return _of_tars(keys, has_load=has_load)
    return Paths(keys, f"a list of {len(keys)} paths")


def _of_path(path: str, column: str | None, *, has_load: bool) -> Source:
    if not path:
        raise ArgumentTypeError("the source is an empty text; give '.' for the current folder")
    if path.endswith(".tar"):
        refuse_column(column, f"the tar file '{path}'")
    if path.endswith(".tar") and not os.path.exists(path):
        return _of_tars(_expanded(path), has_load=has_load)
    if _is_url(path):
        return _of_url(path.rstrip("/"), column, has_load=has_load)
    place = Path(path)
    if not place.exists():
        raise ExtractionError(f"there is no '{path}'; samples come from {_FORMS}")
    if place.is_dir():
        if (place / "dataset_info.json").exists() or (place / "dataset_dict.json").exists():
            dataset = require("datasets", "datasets reads its own folders").load_from_disk(path)
            return _of_dataset(dataset, column, has_load=has_load)
        refuse_column(column, f"the folder '{path}'")
        return _of_folder(place, has_load=has_load)
    suffix = place.suffix.lower()
    if suffix == ".tar":
        return _of_tars([path], has_load=has_load)
    if suffix in LISTS:
        return Paths(read_list(path, place.read_bytes(), column), f"the list '{path}'", str(place.parent))
    if suffix in SUFFIXES:
        return Paths([place.name], f"the image '{path}'", str(place.parent))
    raise ExtractionError(f"'{path}' is no list of samples; they come from {_FORMS}")


def _of_folder(folder: Path, *, has_load: bool) -> Source:
    found: list[str] = []
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [each for each in sorted(folders) if not _leads_back(Path(root, each)) and each[0] != "."]
        inside = Path(root).relative_to(folder)
        found += [(inside / file).as_posix() for file in files]
    samples, what = _samples_among(found, has_load=has_load)
    return Paths(sorted(samples), f"the folder '{folder}' ({what})", str(folder))


def _samples_among(paths: Sequence[str], *, has_load: bool) -> tuple[list[str], str]:
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


def _leads_back(folder: Path) -> bool:
    """Say whether a folder is a link to one that it lies in, on the way to it through other links too."""
    if not folder.is_symlink():
        return False
    target = folder.resolve()
    return any(around.resolve().is_relative_to(target) for around in folder.parents)


def _of_url(url: str, column: str | None, *, has_load: bool) -> Source:
    """Return the samples below a URL, or those of a list or table there, whose own paths are below its folder."""
    fsspec = require("fsspec", "fsspec reads URLs")
    folder = url.rpartition("/")[0]
    try:
        files, root = fsspec.core.url_to_fs(url)
        if Path(url).suffix.lower() in LISTS:
            with files.open(root, "rb") as file:
                keys = read_list(url, file.read(), column)
            return Paths(keys, f"the list '{url}'", folder)
        found = [each[len(root) :].lstrip("/") for each in files.find(root)]
    except (OSError, ValueError, ImportError) as error:
        raise ExtractionError(f"'{url}' cannot be read: {type(error).__name__}: {error}") from error
    samples, what = _samples_among(found, has_load=has_load)
    return Paths(sorted(samples), f"the folder '{url}' ({what})", url)


def _expanded(pattern: str) -> list[str]:
    """Return the paths or URLs that a pattern stands for, as `data-{000..099}.tar` or `data-*.tar`, or it alone.

    Raises:
        ExtractionError: no file fits.
    """
    paths = [pattern]
    if "{" in pattern:
        braceexpand = require("braceexpand", "braceexpand reads patterns with braces")
        try:
            paths = list(braceexpand.braceexpand(pattern))
        except braceexpand.UnbalancedBracesError as error:
            raise ExtractionError(f"'{pattern}' cannot be read as a pattern: {error}") from error
    if "*" in pattern:
        paths = [path for each in paths for path in _fitting(each)]
    if not paths or not (_is_url(paths[0]) or os.path.exists(paths[0])):
        raise ExtractionError(f"there is no '{paths[0] if paths else pattern}'; samples come from {_FORMS}")
    return paths


def _fitting(pattern: str) -> list[str]:
    """Return the files on disk, or at a URL, that fit a pattern with stars."""
    if not _is_url(pattern):
        return sorted(glob(pattern))
    files, path = require("fsspec", "fsspec reads URLs").core.url_to_fs(pattern)
    return [files.unstrip_protocol(each) for each in sorted(files.glob(path))]


def _of_tars(paths: Sequence[str], *, has_load: bool) -> Source:
    starts = _names_of_tars(paths)
    members: list[tuple[str, str, tarfile.TarInfo]] = []
    for path in paths:
        start = f"{starts[path]}/" if len(paths) > 1 else ""
        members += [(f"{start}{member.name}", path, member) for member in _members(path)]
    names, what = _samples_among([key for key, _, _ in members], has_load=has_load)
    chosen = set(names)
    samples = [each for each in members if each[0] in chosen]
    by_name = {(path, member.name): member for _, path, member in members}
    with_data = [(path, _with_data(by_name, path, member)) for _, path, member in samples]
    places = [(path, member.offset_data, member.size) for path, member in with_data]
    return Tars([key for key, _, _ in samples], f"{len(paths)} tar files ({what})", places)


def _with_data(
    members: Mapping[tuple[str, str], tarfile.TarInfo], path: str, member: tarfile.TarInfo
) -> tarfile.TarInfo:
    """Return the member of a tar that has the data: another one for a hard link.

    Raises:
        ExtractionError: that is not there.
    """
    if not member.islnk():
        return member
    linked = members.get((path, member.linkname))
    if linked is None:
        raise ExtractionError(f"'{path}' cannot be read as a tar file: '{member.name}' is a link to nothing in it")
    return _with_data(members, path, linked)


def _names_of_tars(paths: Sequence[str]) -> dict[str, str]:
    """Return what the keys of each tar begin with: its name, or where two have one name, its path below all folders."""
    names = {path: PurePosixPath(path.replace(os.sep, "/")).stem for path in paths}
    if len(set(names.values())) == len(set(paths)):
        return names
    folders = {path: PurePosixPath(path.replace(os.sep, "/")).parent for path in paths}
    common = PurePosixPath(os.path.commonpath(folders.values())).parts
    return {path: "/".join([*folders[path].parts[len(common) :], name]) for path, name in names.items()}


def _members(path: str) -> list[tarfile.TarInfo]:
    """Return the files in a tar, and the hard links.

    Raises:
        ExtractionError: it cannot be read, or is not whole.
    """
    try:
        members, start = list[tarfile.TarInfo](), 0
        with _opened(path) as file:
            while start is not None:
                file.seek(start)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    members += [each for each in tar if each.isfile() or each.islnk()]
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile stops without a word
                    raise ExtractionError(
                        f"'{path}' is damaged or cut off at byte {tar.offset}, behind {len(members)} files; copy it "
                        "again, or leave it out"
                    )
                start = _next_archive(file)
    except (OSError, tarfile.TarError) as error:
        raise ExtractionError(f"'{path}' cannot be read as a tar file: {error}") from error
    return members


def _next_archive(file: IO[bytes]) -> int | None:
    """Return where the next archive begins in a file of several, as `cat` makes it; None at the end."""
    while block := file.read(tarfile.BLOCKSIZE):
        if any(block):
            try:
                tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.TarError:  # a newline, say: `tar` does not look behind the end
                return None
            return file.tell() - len(block)
    return None


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
