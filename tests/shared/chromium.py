"""A page in Chromium without a window: opened, read, typed into and pictured over its own protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60.0
"""An answer takes at most so long: a machine may be busy."""


class Chromium:
    """One browser with one page; a context manager. errors: what the page wrote as errors, its refused scripts too."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert PROGRAM is not None
        self.errors: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        self._process = subprocess.Popen(
            # It reads commands from 3 and answers on 4; a plain `sh` cannot name pipes above 9.
            [
                *("bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash"),
                *(PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"),
                *(f"--user-data-dir={self._profile.name}", "about:blank"),
            ],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reads)
        os.close(writes)
        self._buffer = b""
        self._number = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.look(width=width, height=height, dark=dark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            part = os.read(self._read, 2**20) if ready else b""
            if not part:
                raise RuntimeError("Chromium does not answer")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        facts = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.errors.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")

    def look(self, *, width: int, height: int, dark: bool, media: str = "") -> None:
        """Set the window's size and the theme that its user prefers; media: "print" shows it as on paper."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[theme])

    def open(
        self, address: str, wanted: str = "document.documentElement.dataset.ready !== undefined"
    ) -> None:
        """Open an address, and wait until an expression is true."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(wanted)

    def read(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = SECONDS) -> float:
        """Wait until an expression is true; return the seconds that it took."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if self.read(f"document.documentElement && Boolean({expression})"):
                return time.monotonic() - began
            time.sleep(0.05)
        shown = self.read("document.body.innerText")[:2000]
        raise AssertionError(f"not true after {seconds:.0f} s: {expression}\n{shown}")

    def press(self, key: str) -> None:
        """Press a key, as KeyboardEvent.key names it."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def box(self, selector: str) -> dict[str, float]:
        """Scroll to the first element that a selector finds; return its `x`, `y`, `width`, `height` on the screen."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.read(f"{element}.scrollIntoView({{block: 'center'}})")
        found: dict[str, float] = self.read(f"{element}.getBoundingClientRect().toJSON()")
        return found

    def click(self, selector: str) -> None:
        """Click the middle of the first element that a selector finds."""
        box = self.box(selector)
        middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **middle)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, of all of it or of what the window shows."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def paper(self, file: Path) -> None:
        """Write a PDF of the page."""
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
