"""Headless Chromium, driven over its DevTools pipe: no package is needed.

Where Chromium is: ``LONGDRAFT_CHROMIUM``, or on the path.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("LONGDRAFT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

# key -> (code, number, text that it types)
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, "")}


class Browser:
    """A page in a browser of its own.

    Attributes:
        problems: what the page wrote to the console as errors or warnings, and exceptions that nobody caught.
        requests: addresses that it asked for.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = ["--headless=new", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", "--disable-background-networking", "--disable-component-update"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        line = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, CHROMIUM, *options, "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._number, self._session = 0, ""
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._to)

    def _listen(self) -> None:
        with os.fdopen(self._from, "rb") as stream:
            rest = b""
            while part := stream.read1(1 << 16):
                *messages, rest = (rest + part).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.put(message)
                    else:
                        self._heard(message["method"], message["params"])

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._answers.get(timeout=30))["id"] != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({script})"):
            if time.monotonic() > end:
                raise TimeoutError(f"Not true in {seconds} seconds: {script}")
            time.sleep(0.03)

    def write(self, text: str) -> None:
        """Types into the focused element."""
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, number, text = KEYS[key]
        same = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.send("Input.dispatchKeyEvent", type="keyDown", **same, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **same)

    def point(self, selector: str, click: bool = False) -> None:
        """Moves the mouse to the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getClientRects()[0]"
        x, y = self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screen(self, width: int, height: int) -> None:
        """Sets the size in pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
