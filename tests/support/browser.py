"""A headless Chromium, driven over a pipe (its DevTools protocol) by the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SECONDS = 120.0


class Browser:
    """One window. `with Browser(folder) as browser: browser.open(page)`."""

    def __init__(self, scratch: Path) -> None:
        assert CHROMIUM is not None
        read_in, self._out = _pipe()
        self._in, write_out = _pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={scratch}", "--remote-debugging-pipe"]
        # It reads from descriptor 3 and writes to 4, which only a shell can say; not every shell
        # knows descriptors of two digits.
        line = f"exec {shlex.join([*command, 'about:blank'])} 3<&{read_in} 4>&{write_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            pass_fds=(read_in, write_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_in)
        os.close(write_out)
        self._number, self._pending, self._session = 0, b"", ""
        self.console: list[str] = []
        """What the pages said: errors, exceptions, refused resources."""
        self.requests: list[str] = []
        """Addresses that pages asked for."""

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result
            self._notice(told)

    def open(self, page: Path) -> None:
        """Load a page and wait until it is drawn."""
        self.call("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def window(self, width: int, height: int = 1000, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wanted])

    def scripts(self, on: bool) -> None:
        """For the pages that are opened from now on."""
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """`kind` is Moved, Pressed or Released; places are of the window."""
        button = "left" if kind != "Moved" or clicks else "none"
        self.call(
            "Input.dispatchMouseEvent",
            type=f"mouse{kind}",
            x=x,
            y=y,
            button=button,
            buttons=1 if clicks and kind != "Released" else 0,
            clickCount=clicks,
        )

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1, "width": size["width"], "height": size["height"]}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            assert ready, "the browser says nothing"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._pending += part
        text, _, self._pending = self._pending.partition(b"\0")
        told: dict[str, Any] = json.loads(text)
        return told

    def _notice(self, told: dict[str, Any]) -> None:
        content = told.get("params", {})
        match told.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])
            case "Runtime.exceptionThrown":
                self.console.append(str(content["exceptionDetails"]))
            case "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.console.append(str(content))


def _pipe() -> tuple[int, int]:
    """With numbers far from those the browser wants."""
    ends = os.pipe()
    far = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return far[0], far[1]
