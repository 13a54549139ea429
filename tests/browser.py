"""A headless Chromium that is controlled through a pipe with the DevTools protocol."""

import base64
import hashlib
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from builders import PageReader

EXECUTABLE_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for path in map(shutil.which, EXECUTABLE_NAMES) if path), None)
NO_CHROMIUM = "no Chromium; apt-get install chromium fonts-noto-core fonts-noto-cjk, or any browser built on it"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def check_policy(page: PageReader) -> None:
    """Check that a page can load, send and execute nothing but its own styles and scripts."""
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.text[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in page.policy
    assert page.policy.startswith("default-src 'none';") and "unsafe" not in page.policy
    assert not {name for _, names in page.elements for name in names} & {"src", "href", "srcset", "action", "style"}
    code = page.text["style"] + page.text["script"] + page.text["worker"]
    code = code.replace("http://www.w3.org/2000/svg", "")  # the name of a kind of elements
    assert not re.search(r"https?:|//\w+\.|@import|url\(|innerHTML|eval\(|importScripts|XMLHttp|WebSocket", code)


def check_same_code(page: PageReader, plain: PageReader) -> None:
    """Check that two pages differ in text only."""
    assert page.elements == plain.elements and page.policy == plain.policy
    assert all(page.text[name] == plain.text[name] for name in ("style", "script", "worker"))
    assert not re.search("[<>&\u2028\u2029]", page.text["data"])


class Browser:
    """A browser with one page. `events` has the DevTools events since the page was opened, in order."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        self.pipe, browser_pipe = socket.socketpair()
        self.pipe.settimeout(60)
        with browser_pipe:  # the browser reads file descriptor 3 and writes 4
            command = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&0', CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
            null = subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=browser_pipe, stdout=null, stderr=null)
        self.unread = b""
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank", newWindow=True, width=1280, height=900)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.pipe.close()  # the browser exits when its pipe is closed
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def receive(self) -> dict[str, Any]:
        """Return the next message; messages end with a NUL byte."""
        while b"\0" not in self.unread:
            data = self.pipe.recv(1 << 20)
            assert data, "the browser exited"
            self.unread += data
        text, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.pipe.sendall(json.dumps(message).encode() + b"\0")
        while (response := self.receive()).get("id") != self.number:
            pass
        assert "error" not in response, (method, response)
        return response["result"]

    def open(self, url: str) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        for address in ("about:blank", url):  # the page before may still fail to reach a server that has ended
            self.events.clear()
            self.call("Page.navigate", url=address)
            while not any(event["method"] == "Page.loadEventFired" for event in self.events):
                self.receive()

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested, and check that it caused no message and no error."""
        messages = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        found = [event for event in self.events if event["method"] in messages]
        assert not found, found
        events = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["request"]["url"] for event in events]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, evaluated after pending changes have been drawn."""
        promise = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({expression}))))"
        response = self.call("Runtime.evaluate", expression=promise, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

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


class TranslatingPage:
    """The page of `nmt.export` or `nmt.serve` in a browser."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url
        browser.open(url)
        self.evaluate = browser.evaluate

    def write(self, text: str) -> list[str]:
        """Type a text, and return the lines of its translation."""
        self.evaluate("(source.value = '', source.focus())")
        self.browser.type(text)
        return self.wait()

    def wait(self) -> list[str]:
        """Wait for the translation, and return its lines."""
        self.wait_until("timer === null && translation.getAttribute('aria-busy') !== 'true'")
        return self.texts("#translation p")

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + 30
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, self.evaluate("state.textContent")

    def texts(self, selector: str) -> list[str]:
        query = f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)"
        return [*self.evaluate(query)]

    def highlights(self) -> dict[str, dict[str, float]]:
        """Return the highlighted words of source and translation with their strength."""
        found: dict[str, dict[str, float]] = {"mirror": {}, "translation": {}}
        query = (
            "[...document.querySelectorAll('.word[style*=glow]')].map(n => [n.closest('[id]').id, n.textContent, "
            "+n.style.getPropertyValue('--glow')])"
        )
        for place, word, strength in self.evaluate(query):
            found[place][word] = strength
        return found
