"""Places at which a test can kill the process, to show that no moment loses or doubles a row."""

from __future__ import annotations

import os
import signal

VARIABLE = "FEATX_FAILPOINT"
PLACES = (
    "before the key list", "behind the key list", "before the job file", "behind the job file",
    "before the first rows", "behind the first rows", "before the footer", "behind the footer",
    "before the sync", "behind the sync", "before the rename", "behind the rename",
    "before the sync of the folder", "behind the sync of the folder",
)  # fmt: skip


def reach(place: str) -> None:
    """Kill this process if the environment says so: `FEATX_FAILPOINT="before the rename:2"` at the second time."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, number = wanted.partition(":")
    if name == place:
        if int(number or 1) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os.environ[VARIABLE] = f"{name}:{int(number) - 1}"
