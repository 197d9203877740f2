"""Folders of results, in which a file appears whole or not at all: on a local disk, or by fsspec elsewhere."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from featx.bulk.storage.failpoints import reach
from featx.errors import ExtractionError

TEMPORARY = ".tmp-"


class Folder(Protocol):
    """Publishes files under their final names; whether such a name exists is all the state that a job has."""

    @property
    def path(self) -> str:
        """The path, or the URL."""
        ...

    def make(self) -> None:
        """Make the folder if it is missing."""
        ...

    def names(self) -> set[str]:
        """Return the names of published files."""
        ...

    def unfinished(self) -> list[str]:
        """Return the names of files that a job writes now, or was writing when it was killed."""
        ...

    def free_bytes(self) -> int | None:
        """Return how many bytes the disk can take; None where there is no limit."""
        ...

    def temporary(self, name: str) -> Path:
        """Return where a file is written before it is published; no other process writes there."""
        ...

    def publish(self, temporary: Path, name: str) -> None:
        """Give a written file its final name. A power cut afterwards does not lose it."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file; return False, and change nothing, where there is one of this name."""
        ...

    def place(self, name: str) -> str:
        """Return the path or the URL of a file."""
        ...

    def opened(self, name: str) -> str | BinaryIO:
        """Return what pyarrow reads a file from: its path, or an open file."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        ...


def temporary_name(name: str) -> str:
    """Return a name that no other process on any machine writes to."""
    return f"{TEMPORARY}{name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextmanager
def told_of_writes(folder: Folder) -> Generator[None]:
    """Tell what goes wrong with the disk as an error that names the folder.

    Raises:
        ExtractionError: so it is.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if is_full else str(error)
        raise ExtractionError(
            f"'{folder.path}' cannot be written: {what}. Nothing that was finished is lost: "
            f"{'make room' if is_full else 'mend that'}, and start the job again to go on"
        ) from error


class LocalFolder:
    """A folder on a disk of this machine, or on one that several machines mount.

    Args:
        path: the folder, which is made if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    @property
    def path(self) -> str:
        """The path."""
        return str(self._path)

    def make(self) -> None:
        """Make the folder if it is missing."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExtractionError(
                f"the folder '{self._path}' cannot be made: {error.strerror}; choose another place"
            ) from error
        if not os.access(self._path, os.W_OK):
            raise ExtractionError(f"the folder '{self._path}' cannot be written; choose another place")

    def names(self) -> set[str]:
        """Return the names of published files."""
        if not self._path.is_dir():
            return set()
        return {each.name for each in self._path.iterdir() if not each.name.startswith(TEMPORARY)}

    def unfinished(self) -> list[str]:
        """Return the names of files that a job writes now, or was writing when it was killed."""
        found = self._path.iterdir() if self._path.is_dir() else ()
        return sorted(each.name for each in found if each.name.startswith(TEMPORARY))

    def free_bytes(self) -> int:
        """Return how many bytes the disk can take."""
        there = next(each for each in (self._path.absolute(), *self._path.absolute().parents) if each.exists())
        return shutil.disk_usage(there).free

    def temporary(self, name: str) -> Path:
        """Return where a file is written before it is published; no other process writes there.

        The path is absolute: pyarrow takes a relative one such as `run:1/part.parquet` for a URL.
        """
        return self._path.absolute() / temporary_name(name)

    def publish(self, temporary: Path, name: str) -> None:
        """Give a written file its final name. A power cut afterwards does not lose it."""
        reach("before the sync")
        _sync(temporary)
        reach("after the sync")
        reach("before the rename")
        os.replace(temporary, self._path / name)
        reach("after the rename")
        reach("before the sync of the folder")
        _sync(self._path)
        reach("after the sync of the folder")

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file; return False, and change nothing, where there is one of this name."""
        temporary = self.temporary(name)
        try:
            temporary.write_bytes(data)
            _sync(temporary)
            os.link(temporary, self._path / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _sync(self._path)
        return True

    def place(self, name: str) -> str:
        """Return the path of a file."""
        return str(self._path / name)

    def opened(self, name: str) -> str:
        """Return the absolute path of a file."""
        return str(self._path.absolute() / name)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return (self._path / name).read_bytes()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
