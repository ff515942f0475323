"""An agent that tests play by hand, in virtual time, and the gate's link to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from cellgate.probes.agent import HEARTBEAT, chunk
from cellgate.probes.agents import CONFIRM_S, SILENCE_S, AgentLink
from cellgate.probes.base import Net
from cellgate.probes.runner import Agenda, Runner
from cellgate.proxy.http.fetch import UnitNet
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.patient import FakePatient, reply
from tests.sim.network import Server
from tests.sim.world import World, run

PORT = 9911
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
BEAT = chunk(HEARTBEAT)
DETECTED_S = SILENCE_S + CONFIRM_S + 0.05
GOOD = (Sign.GOOD, Strength.WEAK)
WEAK = (Sign.BAD, Strength.WEAK)
STRONG = (Sign.BAD, Strength.STRONG)
FATAL = (Sign.BAD, Strength.FATAL)
NEUTRAL = (Sign.NEUTRAL, Strength.WEAK)


def says(state: str, reason: str = "so it is", epoch: str = "e1", open_files: Any = 0.1) -> bytes:
    """A line of the agent's, as it goes over the wire."""
    line = '{"cellgate_agent":1,"state":"%s","reason":"%s","epoch":"%s","processes":[],"open_files":%s}'
    return chunk((line % (state, reason, epoch, open_files)).encode())


class PlayedAgent(asyncio.Protocol):
    """One connection at the agent's end: greets, then beats each 250 ms for as long as it is alive."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.transport: asyncio.Transport
        self.request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.place.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self.request += data
        if self.request.endswith(b"\r\n\r\n"):
            self.transport.write(self.place.greeting)
            self._beat()

    def _beat(self) -> None:
        if self.place.beats and not self.transport.is_closing():
            self.transport.write(BEAT)
        self.place.world.loop.outside(0.25, self._beat)


@dataclass
class Place:
    """Where the link looks: a host with or without an agent, and what the link made of it."""

    world: World
    token: str = ""
    greeting: bytes = HEAD + says("ok")
    beats: bool = True
    connections: list[PlayedAgent] = field(default_factory=list)
    found: list[Evidence] = field(default_factory=list)
    server: Server | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Start the agent."""
        self.server = self.world.net.listen(lambda: PlayedAgent(self), "node", PORT, is_outside=True)

    def send(self, data: bytes) -> None:
        """Let the agent say something on its last connection."""
        self.connections[-1].transport.write(data)

    def weights(self) -> list[tuple[Sign, Strength]]:
        """What was found, as the judge weighs it."""
        return [(evidence.sign, evidence.strength) for evidence in self.found]

    def take(self) -> list[tuple[Sign, Strength]]:
        """What was found since the last time."""
        weights = self.weights()
        self.found.clear()
        return weights


@dataclass
class LinkPatient(FakePatient):
    """A patient on the loop's time, with a network."""

    ways: Any = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def net(self) -> Net:
        return cast("Net", self.ways)


NODE = Node("u-2", Role.FOLLOWER)


def play(scenario: Callable[[Place], Coroutine[Any, Any, None]], **options: Any) -> Place:
    """Run a link through the product's own runner and network while a scenario happens."""
    world = World(3)
    world.net.add_host("node")
    place = Place(world, **options)

    async def main() -> None:
        context = LinkPatient(lambda _: reply(200), node=NODE, notes=place.notes)
        context.ways = UnitNet(world.loop, context.heard, connect_timeout_s=3.0, tls=None)
        link = AgentLink(f"node:{PORT}", place.token)
        agenda = Agenda(world.loop)
        runner = Runner(link, context, cast("Any", place.found.append), random.Random(1), agenda)
        runner.start()
        await scenario(place)
        runner.stop()

    run(world, main())
    assert {e.source for e in place.found} <= {"agent"}
    assert {e.node for e in place.found} <= {"u-2"}
    return place
