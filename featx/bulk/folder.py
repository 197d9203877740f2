"""A folder of results on a local disk, in which a file appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from pathlib import Path

from featx.bulk.failpoints import reach

TEMPORARY = ".tmp-"


class Folder:
    """Publishes files under their final names; whether such a name exists is all the state that a job has.

    Args:
        path: the folder, which is made if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def make(self) -> None:
        """Make the folder if it is missing."""
        self.path.mkdir(parents=True, exist_ok=True)

    def names(self) -> set[str]:
        """Return the names of published files."""
        if not self.path.is_dir():
            return set()
        return {each.name for each in self.path.iterdir() if not each.name.startswith(TEMPORARY)}

    def unfinished(self) -> list[str]:
        """Return the names of files that a job writes now, or was writing when it was killed."""
        return sorted(each.name for each in self.path.iterdir() if each.name.startswith(TEMPORARY))

    def free_bytes(self) -> int:
        """Return how many bytes the disk can take."""
        return shutil.disk_usage(self.path).free

    def temporary(self, name: str) -> Path:
        """Return where a file is written before it is published; no other process writes there."""
        return self.path / f"{TEMPORARY}{name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def publish(self, temporary: Path, name: str) -> None:
        """Give a written file its final name. A power cut afterwards does not lose it."""
        reach("before the sync")
        _sync(temporary)
        reach("behind the sync")
        reach("before the rename")
        os.replace(temporary, self.path / name)
        reach("behind the rename")
        reach("before the sync of the folder")
        _sync(self.path)
        reach("behind the sync of the folder")

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file; return False, and change nothing, where there is one of this name."""
        temporary = self.temporary(name)
        temporary.write_bytes(data)
        _sync(temporary)
        try:
            os.link(temporary, self.path / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync(self.path)
        return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
