"""A headless Chromium, spoken to over two pipes: what a page logs, asks for and shows."""

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
EVENTS = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}


def found():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened(path, profile):
    """A `Page` that has loaded the file at `path`."""
    to_browser, ours = os.pipe()
    theirs, from_browser = os.pipe()
    # It reads 3 and writes 4.
    line = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", found()]
    line += [*FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
    # What it says on stderr is of the machine (no D-Bus, no GPU), not of the page.
    browser = subprocess.Popen(line, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    try:
        with open(ours, "wb", buffering=0) as tell, open(theirs, "rb") as hear:
            page = Page(tell, hear)
            page.load(path.as_uri())
            yield page
    finally:
        browser.kill()
        browser.wait()


class Page:
    """One page: `logged` are its errors and all it logs, `requests` the addresses it asked for."""

    def __init__(self, tell, hear):
        self._tell, self._hear, self._rest, self._count, self._session = tell, hear, b"", 0, None
        self.logged, self.requests, self.loaded = [], [], False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def load(self, address):
        """Go there, and wait until all of it is loaded and run."""
        self.loaded = False
        self._call("Page.navigate", url=address)
        while not self.loaded:
            self._note(self._next())
        self._call("Runtime.evaluate", expression="window.ready", awaitPromise=True)

    def run(self, script):
        """The value of JavaScript; one that raises is an error here too."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def resize(self, width, height=900):
        """Show the page in a window of this size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme, media="screen"):
        """Set the user's colour scheme, "light" or "dark", and the medium."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)

    def press(self, key, text=""):
        """Press and release one key, such as "Tab" or "Enter" (with text "\\r")."""
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            pressed |= {"text": text} if text and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", **pressed)

    def screenshot(self, path):
        """Write the whole page as PNG."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._tell.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method in EVENTS:
            self.logged.append(params)
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def _next(self):
        while b"\0" not in self._rest:
            part = self._hear.read1(1 << 16)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
