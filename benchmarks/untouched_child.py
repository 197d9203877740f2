"""Run a function in a forked child process, and get its answer, also where the child hangs or dies."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any


class ChildError(Exception):
    """The child hung, died or raised; the message says which."""


def in_child(function: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return what `function` returns in a child process, by way of JSON.

    Raises:
        ChildError: nothing came within `limit` seconds, or the child ended without an answer.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            answer = json.dumps(function())
            with os.fdopen(write, "w") as stream:
                stream.write(answer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = _read_all(stream.fileno(), time.monotonic() + limit)
    if text is None:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if text is None:
        raise ChildError(f"the child hangs for {limit:.0f} s")
    if not text:
        raise ChildError(f"the child gave no answer, status {status}")
    return json.loads(text)


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    """Return what comes until the end, or None where that is not there in time."""
    parts: list[bytes] = []
    while select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None
