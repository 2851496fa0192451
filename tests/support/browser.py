"""Drives a headless Chromium over the W3C WebDriver protocol, using only the standard library."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api_support import until

from megakernel.timeline.template import policy

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OFF = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
_FLAGS = ("--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in _OFF))

_TIMELINE = Path(__file__).with_name("timeline_page.js")
_SHIFT = "\ue008"


def missing() -> str | None:
    """Return the reason why no browser can be driven on this machine, or None if one can."""
    if not any(shutil.which(name) for name in _CHROMIUM):
        return f"no browser: none of {', '.join(_CHROMIUM)} is on the path"
    return None if shutil.which("chromedriver") else "no chromedriver on the path"


class Browser:
    """One WebDriver session. Its methods raise RuntimeError with the driver's message if a command fails."""

    def __init__(self, port: int, width: int, height: int, profile: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        binary = next(path for name in _CHROMIUM if (path := shutil.which(name)))
        flags = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        chrome = {"binary": binary, "args": flags}
        wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self.resize(width, height)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(json.load(e)["value"]["message"]) from None

    def _do(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("POST", f"/session/{self._session}{path}", body)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page itself. That of the window includes a frame and cannot be below 500 pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._do("/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def open_timeline(self, page: Path) -> None:
        """Load a timeline's page with timeline_page.js appended to its script. Tests can then query the page through
        `window.timeline`."""
        script, end, rest = page.read_text(encoding="utf-8").rpartition("})();</script>")
        asking = page.with_suffix(".asking.html")
        text = script + _TIMELINE.read_text(encoding="utf-8") + end + rest
        own = text.rpartition("<script>")[2].partition("</script>")[0]
        text = re.sub('content="default-src[^"]*"', f'content="{policy(own)}"', text, count=1)
        asking.write_text(text, encoding="utf-8")
        self.visit(asking.resolve().as_uri(), "window.timeline")

    def visit(self, url: str, ready: str) -> None:
        """Load an address and wait until the expression `ready` is true."""
        self._do("/url", {"url": url})
        until(lambda: self.run(f"return !!({ready})"), pause=0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._do("/execute/sync", {"script": script, "args": list(arguments)})

    def log(self) -> list[str]:
        """Return the console messages since the last call, including the page's warnings and errors."""
        return [entry["message"] for entry in self._do("/se/log", {"type": "browser"})]

    def _actions(self, *sources: dict[str, Any]) -> None:
        self._do("/actions", {"actions": list(sources)})

    def wheel(self, x: int, y: int, delta: int) -> None:
        scroll = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": delta, "origin": "viewport"}
        self._actions({"type": "wheel", "id": "wheel", "actions": [scroll]})

    def move(self, x: float, y: float) -> None:
        self._pointer([(x, y)], press=False)

    def click(self, x: float, y: float) -> None:
        self._pointer([(x, y)], press=True)

    def drag(self, start: tuple[float, float], stop: tuple[float, float], *, shift: bool = False) -> None:
        """Drag the mouse from `start` to `stop`, holding the shift key if `shift` is true."""
        if shift:
            self._actions({"type": "key", "id": "keyboard", "actions": [{"type": "keyDown", "value": _SHIFT}]})
        self._pointer([start, stop], press=True)
        if shift:
            self._actions({"type": "key", "id": "keyboard", "actions": [{"type": "keyUp", "value": _SHIFT}]})

    def _pointer(self, points: list[tuple[float, float]], *, press: bool) -> None:
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 30} for x, y in points]
        acts: list[dict[str, Any]] = list(moves)
        if press:
            acts = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        self._actions({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": acts})

    def keys(self, text: str) -> None:
        acts = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._actions({"type": "key", "id": "keyboard", "actions": acts})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"/session/{self._session}/screenshot")))

    def close(self) -> None:
        self._call("DELETE", f"/session/{self._session}")


@contextmanager
def browser(width: int = 1600, height: int = 900) -> Iterator[Browser]:
    """Start chromedriver and a browser with an empty profile, yield the browser, and stop both afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        for _ in range(3):  # once in hundreds of times, chromedriver ends before it has a port
            driver = subprocess.Popen(["chromedriver", "--port=0"], **quiet)  # type: ignore[call-overload]
            found = (re.search(r"on port (\d+)\.", line) for line in driver.stdout)
            if port := next((int(one[1]) for one in found if one), 0):
                break
        try:
            session = Browser(port, width, height, profile)
            try:
                yield session
            finally:
                session.close()
        finally:
            driver.terminate()
            driver.wait()
