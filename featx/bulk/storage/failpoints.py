"""Places at which a test can kill the process, to show that no moment loses or doubles a row."""

from __future__ import annotations

import os
import signal

VARIABLE = "FEATX_FAILPOINT"
PLACES = (
    "before the key list", "after the key list", "before the job file", "after the job file",
    "before the first rows", "after the first rows", "before the footer", "after the footer",
    "before the sync", "after the sync", "before the rename", "after the rename",
    "before the sync of the folder", "after the sync of the folder",
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
