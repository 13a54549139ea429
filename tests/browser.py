"""A headless Chromium, driven through a pipe by the DevTools protocol: enough of it to use a page as a person would."""

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page. `all_events` is all that happened to it, in order."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        self.pipe, theirs = socket.socketpair()
        self.pipe.settimeout(60)
        with theirs:  # the browser reads file descriptor 3 and writes 4
            command = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&0', CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
            self.process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.unread, self.number, self.session, self.events = b"", 0, None, list[dict[str, Any]]()
        target = self.call("Target.createTarget", url="about:blank", newWindow=True, width=1280, height=900)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.pipe.close()  # it ends when nobody listens
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def receive(self) -> dict[str, Any]:
        """The next message; messages end with a NUL."""
        while b"\0" not in self.unread:
            read = self.pipe.recv(1 << 20)
            assert read, "the browser went away"
            self.unread += read
        message, _, self.unread = self.unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.pipe.sendall(json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, path: Path) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, after what is under way has been drawn."""
        drawn = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({expression}))))"
        answer = self.call("Runtime.evaluate", expression=drawn, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def hover(self, selector: str) -> None:
        box = self.evaluate(
            f"(node => (node.scrollIntoView({{block: 'center'}}), node.getBoundingClientRect().toJSON()))"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, *keys: str) -> None:
        for key in keys:
            code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            code |= {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
