"""A Chromium without a window, driven over the DevTools protocol through a pipe: no package, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-extensions",
)
_PATIENCE_S = 120


def browser_path() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `errors` collects what the console says of errors, and what is not caught."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number, self._session = 0, ""
        self._rest = b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], _PATIENCE_S)[0], f"no answer within {_PATIENCE_S} s: the page hangs"
            more = os.read(self._read.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(values["args"])[:600])
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"][:200])

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript, a promise too, and return its value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, *, seconds: float = 20) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.03)
        return value

    def open(self, path: Path, *, fragment: str = "", width: int = 1400, height: int = 900, dark: bool = False) -> None:
        is_narrow = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if is_narrow else 1, mobile=is_narrow
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.absolute().as_uri() + fragment)
        self.wait("document.documentElement?.dataset.ready === 'yes' || document.querySelector('#page > .problem')?.textContent")
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll an element into view; return its left, top, width and height there."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        assert found, f"no {selector}"
        self.settle()
        return tuple(found)

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 0, held: bool = False) -> None:
        button = "left" if clicks or held else "none"
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, buttons=int(held), clickCount=clicks)

    def move(self, x: float, y: float) -> None:
        self.mouse("Moved", x, y)
        self.settle()

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        self.mouse("Moved", x, y)
        for number in range(1, times + 1):
            self.mouse("Pressed", x, y, clicks=number, held=True)
            self.mouse("Released", x, y, clicks=number)
        self.settle()

    def click_on(self, selector: str) -> None:
        left, top, width, height = self.box(selector)
        self.click(left + width / 2, top + height / 2)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, clicks=1, held=True)
        for share in (0.2, 0.5, 0.8, 1.0):
            self.mouse("Moved", start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]), held=True)
        self.mouse("Released", *end, clicks=1)
        self.settle()

    def press(self, key: str, *, text: str = "") -> None:
        code = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "Home": 36,
            "End": 35,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }.get(key, 0)
        values = {"key": key, "code": key, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        self.click_on(selector)
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        if whole:
            height = self.run("document.documentElement.scrollHeight")
            width = self.run("innerWidth")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
            self.settle()
            self.run("new Promise(done => setTimeout(done, 300))")
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser whose files are in the folder `profile`; end it."""
    path = browser_path()
    assert path is not None
    to_read, to_write = os.pipe(), os.pipe()

    def place() -> None:  # the protocol's file descriptors are 3 and 4
        first, second = os.dup(to_read[0]), os.dup(to_write[1])
        os.dup2(first, 3)
        os.dup2(second, 4)

    words = [path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=place, close_fds=False)
    os.close(to_read[0])
    os.close(to_write[1])
    browser = Browser(to_write[0], to_read[1])
    try:
        yield browser
    finally:
        browser._write.close()
        process.terminate()
        process.wait(20)
        browser._read.close()
