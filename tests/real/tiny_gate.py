"""A gate without units behind it: real Board and reports, and answers that take as long as they should."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cellgate.proxy.config.settings import Address
from cellgate.proxy.ingress.haproxy import GATE, Balancers, HaproxyAgent
from cellgate.proxy.ingress.reports import (
    Orca,
    readiness,
    readyz_headers,
    response_line,
    unit_headers,
    unit_health,
)
from cellgate.proxy.process.listeners import listen
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit

TICK_S = 0.25
SHOWN = b"x-cellgate-unit: u\r\nx-cellgate-explain: unit=u\r\n"
"""What a gate shows to those it trusts, beside its load."""
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n%b\r\nok"


class TinyGate:
    """One unit, `u`, with ten places; a POST holds one of them for `answer_s`.

    `asks_for` is how its load shall be reported (an `endpoint-load-metrics-format`, as if a client had sent
    it); `asked_for` are the units that requests were addressed to.
    """

    def __init__(self, answer_s: float = 0.0, *, asks_for: bytes = b"") -> None:
        self.answer_s = answer_s
        self.asks_for = asks_for
        self.board = Board(Rules(slow_start_s=0.001))
        self.board.configure(Fleet(units=(Unit("u", "c", "http://u", max_in_flight=10),)), 0.0)
        self.tell(Sign.GOOD)
        self.responses: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.orca = Orca(self.board, self.responses, lambda: 0)
        self.balancers = Balancers()
        self.stopping = False
        self.served = 0
        self.asked_for: list[str] = []
        self.heads: list[dict[str, str]] = []
        """What stood in the heads of all POSTs."""
        self.port = self.agent_port = 0
        self.now = asyncio.get_running_loop().time
        self.agent = HaproxyAgent(
            self.board, self.now, lambda: self.stopping, lambda peer: peer == "127.0.0.1", self.balancers
        )

    def tell(
        self, sign: Sign, strength: Strength = Strength.STRONG, reason: str = "the test says so"
    ) -> None:
        """Evidence about its unit."""
        self.board.observe(Evidence("u", sign, strength, "canary", reason, 0.0))

    async def visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                await reader.readexactly(int(fields.get("content-length", "0")))
                method, path, _ = first.split(" ")
                writer.write(await self._answer(method, path, fields))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, fields: dict[str, str]) -> bytes:
        if method == "POST":
            self.heads.append(fields)
            lease = self.board.open("u", Ask(), self.now(), retry=False)
            await asyncio.sleep(self.answer_s)
            self.board.close(lease, self.now())
            self.responses["chat", 200] += 1
            self.served += 1
            if name := fields.get("x-cellgate-unit"):
                self.asked_for.append(name)
            return OK % (SHOWN + self.orca.lines.line(self.asks_for) + response_line(stopping=self.stopping))
        about = path.removeprefix("/healthz/unit/") if path.startswith("/healthz/unit/") else GATE
        if about == GATE:
            ready, _ = readiness(self.board, self.stopping)
            status, headers = 200 if ready else 503, readyz_headers(self.board, stopping=self.stopping)
        else:
            status, headers = unit_health(self.board, about)[0], unit_headers(self.board, about)
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n{extra}\r\n".encode()

    async def tick(self) -> None:
        """What the gate's tick does."""
        while True:
            self.orca.refresh(self.now())
            await asyncio.sleep(TICK_S)


@asynccontextmanager
async def listening(*gates: TinyGate) -> AsyncIterator[None]:
    """Gates that listen and tick."""
    servers, ticks = [], []
    for gate in gates:
        server = await asyncio.start_server(gate.visit, "127.0.0.1", 0)
        gate.port = server.sockets[0].getsockname()[1]
        listeners = await listen(Address("127.0.0.1", 0), 16)
        gate.agent_port = listeners[0].getsockname()[1]
        await gate.agent.start(listeners)
        servers.append(server)
        ticks.append(asyncio.create_task(gate.tick()))
    try:
        yield
    finally:
        for server, tick, gate in zip(servers, ticks, gates, strict=True):
            tick.cancel()
            server.close()
            await gate.agent.close()
        await asyncio.gather(*ticks, return_exceptions=True)
