"""Folders of results that fsspec reaches: object stores, and file systems of other machines."""

from __future__ import annotations

import os
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from featx.bulk.extras import require
from featx.bulk.storage.failpoints import reach
from featx.bulk.storage.files import told_of_url
from featx.bulk.storage.folder import TEMPORARY, Folder, LocalFolder, temporary_name
from featx.errors import ArgumentTypeError, ExtractionError

# Where an upload appears when it is whole. Elsewhere a file is uploaded under another name, and renamed.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"})


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path, or at a URL such as `s3://bucket/features`.

    Raises:
        MissingExtraError: fsspec is not installed, or what it needs for such a URL; the message has the command.
        ExtractionError: fsspec knows no such URL, or it is a file or below one.
        ArgumentTypeError: it is no path.
    """
    if not isinstance(cast(object, path), (str, os.PathLike)) or not os.fspath(path):
        raise ArgumentTypeError(f"features are in a folder; give its path or URL, got {path!r:.80}")
    text = os.path.expanduser(os.fspath(path))
    if "://" in text:
        if not text.partition("://")[2].strip("/"):
            raise ExtractionError(f"'{text}' names no folder; give one, such as '{text.rstrip('/')}//bucket/features'")
        return RemoteFolder(text)
    there = next(each for each in (Path(text).absolute(), *Path(text).absolute().parents) if each.exists())
    if not there.is_dir():
        raise ExtractionError(f"'{there}' is a file, and features go to a folder; choose another place than '{text}'")
    return LocalFolder(text)


class RemoteFolder:
    """A folder that fsspec reaches. A file is written on this machine, and uploaded when it is whole.

    Args:
        path: its URL.
    """

    def __init__(self, path: str) -> None:
        self._url = path.rstrip("/")
        self._connect()

    def _connect(self) -> None:
        fsspec = require("fsspec", "fsspec reaches URLs")
        protocol = self._url.partition("://")[0]
        with told_of_url(self._url, "reached"):
            self._files, self._root = fsspec.core.url_to_fs(self._url)
        self._is_object_store = protocol in _OBJECT_STORES

    def __getstate__(self) -> dict[str, Any]:
        return {"_url": self._url}  # connections are made anew in another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    @property
    def path(self) -> str:
        """The URL."""
        return self._url

    def make(self) -> None:
        """Make the folder if it is missing; object stores have none, but for the bucket."""
        if not self._is_object_store:
            with told_of_url(self._url, "written"):
                self._files.makedirs(self._root, exist_ok=True)

    def names(self) -> set[str]:
        """Return the names of published files."""
        return {name for name in self._names() if not name.startswith(TEMPORARY)}

    def unfinished(self) -> list[str]:
        """Return the names of files that are uploaded now, or were when a process was killed."""
        return sorted(name for name in self._names() if name.startswith(TEMPORARY))

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        with told_of_url(self._url):
            try:
                found: list[str] = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def free_bytes(self) -> None:
        """Return None: such a place has no limit that is known."""

    def temporary(self, name: str) -> Path:
        """Return where a file is written on this machine before it is uploaded."""
        return Path(tempfile.gettempdir()) / temporary_name(name)

    def publish(self, temporary: Path, name: str) -> None:
        """Upload a written file under its final name, and remove it here."""
        reach("before the rename")
        with told_of_url(self._url, "written"):
            if self._is_object_store:
                self._files.put_file(str(temporary), self._inside(name))
            else:
                uploaded = self._inside(temporary.name)
                self._files.put_file(str(temporary), uploaded)
                self._files.mv(uploaded, self._inside(name))
            size, there = temporary.stat().st_size, self._files.info(self._inside(name))["size"]
        if size != there:
            raise ExtractionError(f"'{self.place(name)}' has {there} bytes of {size} after its upload; start again")
        reach("after the rename")
        temporary.unlink()

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file; return False, and change nothing, where there is one of this name.

        Stores without exclusive writes may let two jobs that start in the same moment both write.
        """
        path = self._inside(name)
        with told_of_url(self._url, "written"):
            if self._files.exists(path):
                return False
            try:
                self._files.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError, ValueError):  # it has no exclusive writes
                self._files.pipe_file(path, data)
        return True

    def place(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self._url}/{name}"

    def opened(self, name: str) -> Any:
        """Return an open file."""
        if self._files.protocol == "memory":  # which opens one object for all, with one position
            return BytesIO(self.read(name))
        return self._files.open(self._inside(name), "rb")

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return self._files.cat_file(self._inside(name))

    def _inside(self, name: str) -> str:
        return f"{self._root}/{name}"
