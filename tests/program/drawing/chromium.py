"""A headless Chromium, spoken to over its DevTools protocol on two pipes: no port, no network, no package."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT = 60.0


def find() -> str | None:
    """The path of the browser, if there is one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser of its own; `events` holds what the browser said unasked."""

    def __init__(self, program: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._unread = b""
        theirs_in, ours_out = (_high(end) for end in os.pipe())
        ours_in, theirs_out = (_high(end) for end in os.pipe())
        self._in, self._out = ours_in, ours_out
        arguments = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "--force-prefers-color-scheme=light"),
        ]
        # The browser reads its commands from descriptor 3 and answers on 4.
        actions = [
            (os.POSIX_SPAWN_OPEN, 2, str(folder / "browser.log"), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, theirs_in, 3),
            (os.POSIX_SPAWN_DUP2, theirs_out, 4),
        ]
        environment = os.environ | {"HOME": str(folder)}
        self._process = os.posix_spawn(program, [program, *arguments], environment, file_actions=actions, setpgroup=0)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1200, height=1000, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path) -> None:
        """Loads a file, and waits until it has drawn itself."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.settle()

    def settle(self) -> None:
        """Waits until what has been asked for is on the screen."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression evaluates to; promises are waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: `mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel`."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def key(self, key: str) -> None:
        """Presses and releases a key, such as `ArrowLeft`, `Enter` or `+`."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, and what the browser has logged."""
        return [e for e in self.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]

    def requested(self) -> list[str]:
        """The addresses that were asked for since open()."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._unread:
            assert time.monotonic() < deadline, "the browser does not answer"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _high(descriptor: int) -> int:
    """The same, out of the way of the numbers that the browser's ends get."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
