"""A headless Chromium for tests of a page, over its DevTools protocol: no driver, no library beyond aiohttp.

https://chromedevtools.github.io/devtools-protocol/ describes the methods and events named here.
"""

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT = 20.0  # seconds that anything on a page may take
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " "), "End": (35, ""), "ArrowUp": (38, "")}
_SHIFT = 8


def find() -> str | None:
    """The browser's program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def needed() -> pytest.MarkDecorator:
    """Skips tests where there is no browser."""
    return pytest.mark.skipif(find() is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed")


@contextmanager
def running(profile: Path) -> Iterator[str]:
    """The address of a browser of its own, until the end of the block; a browser that does not start skips."""
    try:
        browser = Process(str(find()), profile)
    except RuntimeError as error:
        pytest.skip(str(error))
    with browser:
        yield browser.address


class Process:
    """A browser process with an empty profile, until the end of a `with` block.

    Attributes:
        address: of its protocol.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self, program: str, profile: Path) -> None:
        args = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--disable-gpu"]
        args += ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            args.append("--no-sandbox")  # the sandbox does not work for root, as in a container
        self._process = subprocess.Popen([program, *args], stderr=subprocess.PIPE, text=True)
        impatient = threading.Timer(WAIT, self._process.kill)
        impatient.start()
        lines, found = [], None
        for line in self._process.stderr:
            lines.append(line)
            if found := re.match(r"DevTools listening on (ws://\S+)", line):
                break
        impatient.cancel()
        if not found:
            self._process.kill()
            raise RuntimeError(f"{program} does not start: {''.join(lines[-3:])}")
        self.address = found[1]
        threading.Thread(target=self._process.stderr.read, daemon=True).start()  # or a full pipe would stop it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(WAIT)


class Browser:
    """A connection to a running browser, with cookies and storage of its own."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self.context = ""

    async def send(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for what it gives."""
        number = len(self._replies)
        self._replies[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        await self._socket.send_json(message)
        return await asyncio.wait_for(self._replies[number], WAIT)

    async def open(self, url: str, width: int = 1000, height: int = 700) -> "Page":
        """A new tab of that size, once the page has loaded."""
        self.context = self.context or (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=self.context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await page.send(f"{domain}.enable")
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.resize(width, height)
        await page.go(url)
        return page

    async def listen(self) -> None:
        """Hand replies and events to whom they concern, until the connection ends."""
        async for message in self._socket:
            if message.type != WSMsgType.TEXT:
                return
            data = json.loads(message.data)
            if "id" in data:
                reply = self._replies[data["id"]]
                if "error" in data:
                    reply.set_exception(RuntimeError(data["error"]["message"]))
                else:
                    reply.set_result(data["result"])
            elif page := self._pages.get(data.get("sessionId", "")):
                page.on_event(data["method"], data["params"])


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Browser]:
    """A connection to the browser at an address of its protocol."""
    async with ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
        browser = Browser(socket)
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
            if browser.context:
                await browser.send("Target.disposeBrowserContext", browserContextId=browser.context)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


class Page:
    """A tab.

    Attributes:
        requests: addresses that it asked for.
        problems: what it wrote to the console as a warning or an error, and scripts that failed.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self._session = browser, session
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.problems: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol on this tab."""
        return await self.browser.send(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Something happened on the page."""
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", details).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])

    async def go(self, url: str = "") -> None:
        """Open an address, or load the page again, and wait until it is there."""
        self._loaded.clear()
        await (self.send("Page.navigate", url=url) if url else self.send("Page.reload"))
        await asyncio.wait_for(self._loaded.wait(), WAIT)

    async def resize(self, width: int, height: int) -> None:
        """Show the page in a window of that size; narrow ones are phones."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        await self.send("Emulation.setDeviceMetricsOverride", **size, mobile=phone)
        await self.send("Emulation.setTouchEmulationEnabled", enabled=phone)

    async def colours(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of what it promises.

        Raises:
            RuntimeError: it throws.
        """
        told = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if details := told.get("exceptionDetails"):
            raise RuntimeError(details["exception"].get("description", details["text"]))
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds."""
        look = f"const look = () => ({condition}) ? done() : requestAnimationFrame(look); look();"
        try:
            await self.run(f"new Promise(done => {{ {look} }})")
        except TimeoutError:
            shown = await self.run("document.body.innerText")
            raise AssertionError(f"never came true: {condition}\nThe page shows:\n{shown}") from None

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and let go of a key."""
        code, text = _KEYS[key]
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        common["modifiers"] = _SHIFT if shift else 0
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Enter text where the focus is."""
        await self.send("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = await self.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def picture(self, path: Path) -> None:
        """Write what is to be seen as a PNG file."""
        path.write_bytes(base64.b64decode((await self.send("Page.captureScreenshot"))["data"]))

    async def accessible(self) -> list[dict[str, Any]]:
        """What a screen reader is told: role, name and properties of each element that is not ignored."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                **{item["name"]: item["value"].get("value") for item in node.get("properties", [])},
            }
            for node in nodes
            if not node["ignored"]
        ]
