"""Headless Chromium, driven by its DevTools protocol: a page opened, clicked, measured and photographed.

Source of the wire format: https://chromedevtools.github.io/devtools-protocol/ (Page, Runtime, Emulation).
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.real.programs import find, running
from tests.wire.process import eventually

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_SAMPLE_US = 200
_NO_SCRIPT = ("(idle)", "(program)", "(root)")
"""Names of the profiler for when no script runs."""
_WAIT_S = 60.0


class Page:
    """One tab. `problems` are what its console complained of: a blocked script, an exception."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self.problems: list[str] = []

    async def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Be so large, and in this theme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        await self._call("Emulation.setDeviceMetricsOverride", **metrics)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", features=[theme])

    async def open(self, url: str) -> None:
        """Go there; exceptions and refusals of the content security policy are noted from here on."""
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)

    async def send_with(self, headers: dict[str, str]) -> None:
        """Add these headers to all it asks for, as a proxy would."""
        await self._call("Network.enable")
        await self._call("Network.setExtraHTTPHeaders", headers=headers)

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript; promises are awaited. Raises AssertionError."""
        answer = await self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression once it is true. Raises AssertionError with what the page shows."""
        give_up_at = time.monotonic() + _WAIT_S
        while not (value := await self.run(script)):
            # There is no body until the first bytes of the page have come.
            shows = await self.run("document.body?.innerText")
            assert time.monotonic() < give_up_at, f"not so: {script}; shown is:\n{shows}\n{self.problems}"
            await asyncio.sleep(0.05)
        return value

    async def script_ms(self, seconds: float) -> float:
        """How long scripts run within the next `seconds`, garbage collection included, in milliseconds:
        what the samples of the profiler add up to.
        """
        await self._call("Profiler.enable")
        await self._call("Profiler.setSamplingInterval", interval=_SAMPLE_US)
        await self._call("Profiler.start")
        await asyncio.sleep(seconds)
        profile = (await self._call("Profiler.stop"))["profile"]
        functions = {node["id"]: node["callFrame"]["functionName"] for node in profile["nodes"]}
        taken = zip(profile["samples"], profile["timeDeltas"], strict=True)
        return float(sum(us for node, us in taken if functions[node] not in _NO_SCRIPT)) / 1000

    async def photograph(self) -> bytes:
        """What is in sight, as PNG."""
        return b64decode((await self._call("Page.captureScreenshot", format="png"))["data"])

    async def _call(self, method: str, **parameters: object) -> Any:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=_WAIT_S)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["source"] == "security":
            self.problems.append(message["params"]["entry"]["text"])


@contextmanager
def chromium(folder: Path) -> Iterator[int]:
    """A browser with a profile of its own, for as long as the context lasts; where it is told what to do."""
    command = [find("chromium"), *_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    # It writes there where it listens.
    file = folder / "DevToolsActivePort"
    with running(command, folder / "chromium.log"):
        assert eventually(lambda: file.exists() and "\n" in file.read_text()), "Chromium does not start"
        yield int(file.read_text().splitlines()[0])


@asynccontextmanager
async def tab(browser: int) -> AsyncIterator[Page]:
    """A new tab, which has nothing of those before it."""
    tabs = f"http://127.0.0.1:{browser}/json"
    async with aiohttp.ClientSession() as client:
        async with client.put(f"{tabs}/new?about:blank") as reply:
            made = await reply.json()
        async with client.ws_connect(made["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            yield Page(socket)
        async with client.get(f"{tabs}/close/{made['id']}") as reply:
            await reply.read()
