"""Drive a headless Chromium over its pipe: load a page, ask it things, click and type in it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "Chromium is not installed; on Debian: apt-get install chromium"
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--remote-debugging-pipe --force-color-profile=srgb --hide-scrollbars"
).split()


def find_chromium() -> str | None:
    """Return the program, if there is one."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page; a context manager, which ends it.

    Messages are JSON, each followed by a zero byte, on the descriptors 3 and 4 of the browser (the DevTools protocol).
    """

    def __init__(self, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        program = find_chromium()
        assert program is not None, MISSING
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = _high_pipe()
        self._from, to_write = _high_pipe()[0:2]
        arguments = [program, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._pid = os.posix_spawn(
            program,
            arguments,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, to_read, 3),
                (os.POSIX_SPAWN_DUP2, to_write, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Runtime.enable")
        self.send("Log.enable")
        self.send("Network.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.emulate(dark=dark)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._folder.cleanup()

    def emulate(self, *, dark: bool) -> None:
        """Say that the reader wants light or dark pages."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> None:
        """Load a file, and wait until its scripts have run."""
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && Boolean(window.page)")
        self.frame()

    def evaluate(self, expression: str) -> Any:  # Any: a value of JSON
        """Return the value of JavaScript, awaited if it is a promise."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until JavaScript is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"still not so: {condition}"
            time.sleep(0.02)

    def frame(self) -> None:
        """Wait until what has changed is painted."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def click(self, x: float, y: float) -> None:
        """Click at a point of the page."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frame()

    def click_on(self, selector: str) -> None:
        """Click on the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.click(x, y)

    def press(self, key: str) -> None:
        """Press and release a key, by its name in events."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def type(self, text: str) -> None:
        """Type a text where the cursor is."""
        self.send("Input.insertText", text=text)
        self.frame()

    def screenshot(self, path: Path) -> None:
        """Save what the page looks like as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """Return errors that scripts raised or logged, and what was asked of a network, since the page was loaded."""
        self.evaluate("0")
        found: list[str] = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent" and not params["request"]["url"].startswith("file:"):
                found.append(f"request of {params['request']['url']}")
        return found


def _high_pipe() -> tuple[int, int]:
    """Make a pipe whose descriptors are none of those that the browser wants."""
    ends: list[int] = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends[0], ends[1]
