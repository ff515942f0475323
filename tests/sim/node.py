"""One machine of a simulated unit, at an address of its own: the process it runs, and how that is looked at.

Its agent listens on AGENT_PORT and tells what became of the process; a page on PAGE_PORT is answered by the
process itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

from cellgate.probes.agent_stream import HEARTBEAT
from cellgate.probes.agents import BEAT_S, LOOK_S
from tests.sim.http_server import Connection, Exchange
from tests.sim.loop import Event

if TYPE_CHECKING:
    from tests.sim.world import World

AGENT_PORT = 9911
PAGE_PORT = 8080
LOOK_AGAIN_S = 0.1


class Node:
    """`state` is what an agent calls it: ok, stopped, gone; `seen` is what its agent said of it last.

    `report` is its answer to `GET /report`; None: it is an older agent.
    """

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.host = world.net.names.get(name, [""])[0] or world.net.add_host(name)
        self.watchers: dict[_Watcher, None] = {}
        self.report: dict[str, Any] | None = None
        self.is_well = True
        """Whether its page says that it is."""
        self.read_at: list[float] = []
        """When its page was read."""
        self._world = world
        self.start()
        self.seen = self._line()
        world.net.listen(lambda: _Watcher(world, self), self.host, AGENT_PORT, is_outside=True)

    @property
    def agent(self) -> str:
        """HOST:PORT of its agent."""
        return f"{self.name}:{AGENT_PORT}"

    @property
    def page(self) -> str:
        """The URL of the page that its process answers."""
        return f"http://{self.name}:{PAGE_PORT}/healthz"

    def start(self) -> None:
        """A fresh process."""
        self.epoch = f"{self._world.loop.time():.6f}"
        self.state = "ok"
        if (self.host, PAGE_PORT) not in self._world.net.listeners:
            self._world.net.listen(
                lambda: Connection(self._world.loop, self._answer), self.host, PAGE_PORT, is_outside=True
            )
        self._note()

    def stop(self) -> None:
        """The process is stopped: it answers when it goes on."""
        self.state = "stopped"
        self._note()

    def go_on(self) -> None:
        """It was only stopped."""
        self.state = "ok"
        self._note()

    def die(self) -> None:
        """The process is gone; the machine and its agent are there."""
        self.state = "gone"
        self._world.net.kill(f"{self.name}:{PAGE_PORT}")
        self._note()

    def _line(self) -> bytes:
        said: dict[str, Any] = {"cellgate_agent": 1, "state": self.state}
        said |= {"reason": f"the worker is {self.state}", "epoch": self.epoch}
        said |= {"processes": [], "open_files": None}
        return json.dumps(said, separators=(",", ":")).encode()

    def _note(self) -> None:
        """The agent sees it when it looks next."""
        self._world.loop.outside(self._world.rng.uniform(0.0, LOOK_S), self._look)

    def _look(self) -> None:
        before, self.seen = self.seen, self._line()
        if self.seen != before:
            for watcher in self.watchers:
                watcher.send(self.seen)

    def _answer(self, exchange: Exchange) -> None:
        if exchange.is_gone:
            return
        if self.state == "stopped":
            self._world.loop.outside(LOOK_AGAIN_S, self._answer, exchange)
        else:
            self.read_at.append(self._world.loop.time())
            exchange.reply(200 if self.is_well else 503, b"{}")


class _Watcher(asyncio.Protocol):
    """One connection to the agent: the stream of `GET /watch`, or its report."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._beats: Event | None = None
        self._head = b""

    def send(self, line: bytes) -> None:
        self._transport.write(chunk(line))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self._beats is None and self._head.endswith(b"\r\n\r\n"):
            if self._head.startswith(b"GET /report"):
                self._reply(self._node.report)
                return
            self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            self.send(self._node.seen)
            self._node.watchers[self] = None
            self._beat()

    def connection_lost(self, exc: Exception | None) -> None:
        self._node.watchers.pop(self, None)
        if self._beats is not None:
            self._beats.cancel()

    def _reply(self, report: dict[str, Any] | None) -> None:
        """An agent without reports is an older one."""
        body = json.dumps({"cellgate_agent": 1, **(report or {})}).encode()
        status = b"200 OK" if report is not None else b"404 Not Found"
        head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)
        self._transport.close()

    def _beat(self) -> None:
        if self._beats is not None:
            self.send(HEARTBEAT)
        self._beats = self._world.loop.outside(BEAT_S, self._beat)


def chunk(line: bytes) -> bytes:
    """One line as one chunk of HTTP/1.1, as agents send it."""
    return b"%x\r\n%b\n\r\n" % (len(line) + 1, line)
