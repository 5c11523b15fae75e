"""A headless Chromium, driven through its debugging pipe: what a page logs, and what it asks the
network for.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--remote-debugging-pipe",
]


def chromium() -> str | None:
    """Where Chromium is installed."""
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


@dataclass
class Seen:
    """What a page did while it was open."""

    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """One browser with one tab.

    Args:
        profile: an empty folder for its user data.
    """

    def __init__(self, profile: Path) -> None:
        found = chromium()
        assert found, "chromium is not installed; Debian: apt-get install chromium"
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        # The pipe's ends have to be 3 and 4 in the browser; until then they must not be in the way
        # there.
        theirs_in, theirs_out = (
            fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (read_end, write_end)
        )
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", command, found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read_end, write_end, theirs_in, theirs_out):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = next(
            t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """Ends it."""
        self._session = None
        self.send("Browser.close")
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def _read(self, until: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                return None
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def send(self, method: str, **parameters: Any) -> Any:
        """Sends a command and gives its result back."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(time.monotonic() + 60)
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._events.append(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Seen:
        """Opens a page of this machine, and waits until all of its pictures are drawn."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + 60
        drawn = (
            "document.readyState === 'complete' &&"
            " [...document.querySelectorAll('.bridge-picture')].every((p) =>"
            " p.querySelector('svg.marks, canvas.marks'))"
        )
        while not self.evaluate(drawn):
            assert time.monotonic() < until, f"not all pictures of {page} are drawn: {self.seen()}"
            time.sleep(0.05)
        time.sleep(0.2)
        return self.seen()

    def seen(self) -> Seen:
        """What has happened since the page was opened."""
        self.evaluate("1")
        seen = Seen()
        for event in self._events:
            parameters = event.get("params", {})
            match event.get("method"):
                case "Runtime.consoleAPICalled":
                    text = " ".join(
                        str(a.get("value", a.get("description"))) for a in parameters["args"]
                    )
                    seen.console.append(f"{parameters['type']}: {text}")
                case "Runtime.exceptionThrown":
                    seen.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
                case "Log.entryAdded":
                    seen.errors.append(parameters["entry"]["text"])
                case "Network.requestWillBeSent":
                    seen.requests.append(parameters["request"]["url"])
        return seen

    def hover(self, x: float, y: float) -> str:
        """Moves the mouse to a place of the page, and gives back what the tooltip says."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        time.sleep(0.1)
        return self.evaluate(
            "(document.querySelector('#vg-tooltip-element.visible') || {}).innerText || ''"
        )

    def click(self, text: str) -> None:
        """Clicks on what says this text, and moves the mouse away."""
        x, y = self.evaluate(f"""(() => {{
            const found = [...document.querySelectorAll('text')].find((t) => t.textContent === {json.dumps(text)});
            const box = found.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        time.sleep(0.5)

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        """Writes the page as it is seen to a PNG."""
        options: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, **size, "scale": 1}}
            options["clip"] |= {"width": size["width"], "height": size["height"]}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))
        return path
