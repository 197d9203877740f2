"""Tar files as sources of samples, as webdataset writes them: members are read by their offsets."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath
from typing import IO, Any

from featx.bulk.extras import require
from featx.bulk.storage.files import is_url, opened, samples_among
from featx.errors import ExtractionError, MissingExtraError


@dataclass(frozen=True)
class Tars:
    """Members of tar files, by the offsets at which they lie."""

    keys: Sequence[str]
    kind: str
    places: Sequence[tuple[str, int, int]]

    def item(self, index: int) -> Any:
        """Return a member as a file."""
        path, offset, size = self.places[index]
        if is_url(path):  # a file there would read ahead
            files, inside = require("fsspec", "fsspec reads URLs").core.url_to_fs(path)
            data = files.cat_file(inside, start=offset, end=offset + size)
            if len(data) != size:
                raise ExtractionError(
                    f"'{path}' gives {len(data)} bytes where {size} were asked for: its server does not send parts of "
                    "files; copy the tar to a disk"
                )
            return BytesIO(data)
        with open(path, "rb") as file:
            file.seek(offset)
            return BytesIO(file.read(size))


def find_members(paths: Sequence[str], *, has_load: bool) -> Tars:
    """Return the images in tar files, or all files where `load` makes the inputs and there is no image.

    Raises:
        ExtractionError: a tar cannot be read, or is not whole.
    """
    starts = _names_of_tars(paths)
    members: list[tuple[str, str, tarfile.TarInfo]] = []
    for path in paths:
        start = f"{starts[path]}/" if len(paths) > 1 else ""
        members += [(f"{start}{member.name}", path, member) for member in _members(path)]
    names, what = samples_among([key for key, _, _ in members], has_load=has_load)
    chosen = set(names)
    samples = [each for each in members if each[0] in chosen]
    # A file that was added twice is a link to itself the second time.
    in_order = sorted(members, key=lambda each: not each[2].islnk())
    by_name = {(path, member.name): member for _, path, member in in_order}
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
    if linked is None or linked is member:
        where = "nothing in it" if linked is None else "itself, as it was added twice"
        raise ExtractionError(f"'{path}' cannot be read as a tar file: '{member.name}' is a link to {where}")
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
        with opened(path) as file:
            while start is not None:
                file.seek(start)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    members += [each for each in tar if each.isfile() or each.islnk()]
                if sparse := next((each.name for each in members if each.sparse is not None), None):
                    raise ExtractionError(f"'{path}' has holes in '{sparse}'; make it anew, without --sparse")
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile stops without a word
                    raise ExtractionError(
                        f"'{path}' is damaged or cut off at byte {tar.offset}, after {len(members)} files; copy it "
                        "again, or leave it out"
                    )
                start = _next_archive(file)
    except MissingExtraError:
        raise
    except (OSError, ValueError, ImportError, tarfile.TarError) as error:  # of fsspec too
        raise ExtractionError(f"'{path}' cannot be read as a tar file: {error}") from error
    return members


def _next_archive(file: IO[bytes]) -> int | None:
    """Return where the next archive begins in a file of several, as `cat` makes it; None at the end."""
    while block := file.read(tarfile.BLOCKSIZE):
        if any(block):
            try:
                tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.TarError:  # a newline, say: `tar` does not look past the end
                return None
            return file.tell() - len(block)
    return None
