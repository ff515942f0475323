"""Probes of nodes through real sockets: servers that answer, refuse, wait, chatter and talk nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded

from cellgate.extras import EXTRAS, part_of
from cellgate.probes.base import Net
from cellgate.probes.nodes import HttpProbe, NodeProbe, TcpProbe
from cellgate.proxy.http import fetch
from cellgate.proxy.http.fetch import UnitNet
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.extras import needs
from tests.patient import FakePatient, findings_of, reply

GOOD = (Sign.GOOD, Strength.WEAK)
DOUBT = (Sign.BAD, Strength.WEAK)
BAD = (Sign.BAD, Strength.STRONG)
TIMEOUT_S = 0.3

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class NodePatient(FakePatient):
    """A patient in the real world, whose node is looked at through a `UnitNet`."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self._net = UnitNet(self.loop, self.received, connect_timeout_s=1.0, tls=None)

    @property
    def net(self) -> Net:
        return self._net

    def now(self) -> float:
        return self.loop.time()

    def close(self) -> None:
        self._net.close()


def look(talk: Talk | None, probe: Callable[[str], NodeProbe]) -> Evidence:
    """What `probe` (made from an address) finds at a server that talks so; None: nobody listens."""

    async def run() -> Evidence:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if talk is not None:
                    await talk(reader, writer)
            except OSError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if talk is None:
            server.close()
            await server.wait_closed()
        context = NodePatient(lambda _: reply(200), node=Node("n1", Role.LEADER))
        async with asyncio.timeout(30):
            (evidence,) = await findings_of(probe(address), context)
        context.close()
        server.close()
        assert isinstance(evidence, Evidence)
        assert evidence.node == "n1"
        return evidence

    return asyncio.run(run())


def http(address: str) -> NodeProbe:
    return HttpProbe(f"http://{address}/health", timeout_s=TIMEOUT_S)


def tcp(address: str) -> NodeProbe:
    return TcpProbe(address, timeout_s=TIMEOUT_S)


def grpc(address: str) -> NodeProbe:
    probe: NodeProbe = part_of("node_probes", "grpc").GrpcProbe(address, timeout_s=TIMEOUT_S)
    return probe


def exporter(address: str) -> NodeProbe:
    kind = part_of("node_probes", "exporter").ExporterProbe
    probe: NodeProbe = kind(f"http://{address}/metrics", "x > 0", timeout_s=TIMEOUT_S)
    return probe


MORE = [pytest.param(probe, marks=needs("node_probes")) for probe in (grpc, exporter)]


def says(answer: bytes) -> Talk:
    """Answers whatever is asked, then closes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        await writer.drain()

    return talk


def page(body: bytes, status: bytes = b"200 OK") -> Talk:
    return says(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))


async def is_silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65536)
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"4\r\ny 1\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


def health(status: bytes) -> Talk:
    """A gRPC server with a health service."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http2 = H2Connection(H2Configuration(client_side=False))
        http2.initiate_connection()
        while data := await reader.read(65536):
            if any(isinstance(event, StreamEnded) for event in http2.receive_data(data)):
                http2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
                http2.send_data(1, b"\0\0\0\0\2\x08" + status)
                http2.send_headers(1, [("grpc-status", "0")], end_stream=True)
            writer.write(http2.data_to_send())

    return talk


@pytest.mark.parametrize("probe", [http, tcp, *MORE])
def test_nobody_listens(probe: Callable[[str], NodeProbe]) -> None:
    evidence = look(None, probe)
    assert (evidence.sign, evidence.strength) == (DOUBT if probe is exporter else BAD)
    assert evidence.reason.startswith("connection refused by 127.0.0.1:")


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine too busy to fire timers in time is no reason to believe a node."""
    monkeypatch.setattr(fetch, "LATE_S", inf)
    if "node_probes" in EXTRAS:
        monkeypatch.setattr(part_of("node_probes", "grpc"), "_LATE_S", inf)


@pytest.mark.usefixtures("never_late")
@pytest.mark.parametrize("probe", [http, *MORE])
@pytest.mark.parametrize("talk", [is_silent, never_ends, says(b""), says(b"\x80\x81\r\n\r\n" * 100)])
def test_silence_endlessness_and_nonsense_are_doubts(talk: Talk, probe: Callable[[str], NodeProbe]) -> None:
    evidence = look(talk, probe)
    assert (evidence.sign, evidence.strength) == DOUBT


@pytest.mark.parametrize(
    ("talk", "probe", "outcome"),
    [
        (page(b"well"), http, GOOD),
        (page(b"", b"503 Service Unavailable"), http, BAD),
        (says(b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"), http, BAD),
        (is_silent, tcp, GOOD),
        *(
            pytest.param(*row, marks=needs("node_probes"))
            for row in (
                (health(b"\1"), grpc, GOOD),
                (health(b"\2"), grpc, BAD),
                (page(b"x 0\n"), exporter, GOOD),
                (page(b"x 1\n"), exporter, BAD),
                (page(b"y 1\n" * (10 << 18)), exporter, DOUBT),
                (page(b"y 1\n" * (10 << 18)), grpc, DOUBT),
            )
        ),
    ],
)
def test_a_server_that_answers_is_believed(
    talk: Talk, probe: Callable[[str], NodeProbe], outcome: tuple[Sign, Strength]
) -> None:
    evidence = look(talk, probe)
    assert (evidence.sign, evidence.strength) == outcome
