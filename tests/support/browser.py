"""A headless Chromium, driven through pipes in its DevTools protocol: it needs no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--remote-debugging-pipe", "about:blank"),
)


class Browser:
    """One page. Each method waits until it is done."""

    def __init__(self, send: int, receive: int) -> None:
        """Talk to a Chromium through the ends of two pipes."""
        self._send = os.fdopen(send, "wb", buffering=0)
        self._receive = os.fdopen(receive, "rb")
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors: list[str] = []
        """What scripts threw, and what a Content-Security-Policy refused."""
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Open a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("document.querySelector('main h1, main .problem') !== null")

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def measure(self, script: str) -> float:
        """Seconds that the page's thread works on a script: its own time, not the clock's, for others work here too."""
        self.call("Performance.enable", timeDomain="threadTicks")
        before = self._read_task_time()
        self.run(script)
        spent = self._read_task_time() - before
        self.call("Performance.disable")
        return spent

    def _read_task_time(self) -> float:
        metrics = self.call("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def wait(self, condition: str, *, limit_s: float = 60.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + limit_s
        while self.run(condition) is not True:
            assert time.monotonic() < end, f"{condition} did not come true: {self.run('document.body.innerText')}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str) -> None:
        """Click the first element of a selector."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Put text into a field."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{field}.value = {json.dumps(text)}; {field}.dispatchEvent(new Event('input'))")

    def take_picture(self, file: Path) -> None:
        """Write what is seen as a PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _read(self) -> bytes:
        data = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return bytes(data)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self._send.write(json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        self._receive.read()
        self._send.close()
        self._receive.close()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser with a profile of its own."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [str(CHROMIUM), f"--user-data-dir={profile}", *_OPTIONS]
        # Chromium reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            browser = Browser(to_browser[1], from_browser[0])
            yield browser
            browser.close()
        finally:
            process.kill()
            process.wait()
