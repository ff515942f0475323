"""TLS on both sides of the gate, and certificates that change while it runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Tls
from cellgate.proxy.observe.counters import RELOADS, TALLIES
from cellgate.proxy.process.tls import LiveTls
from tests.real.certificates import Certificate, authority, signed_by
from tests.wire.client import chat
from tests.wire.stage import stage
from tests.wire.unit import SSE_HEAD, STREAM, TOKENS, Received, chunk, then_close, whole

PEM = str(Path(__file__).parents[1] / "wire" / "localhost.pem")
EVENTS = b"".join(TOKENS)
TO_CLIENTS = Tls(cert=PEM, key=PEM)
TO_UNITS = Tls(ca=PEM)
BOTH = Tls(cert=PEM, key=PEM, ca=PEM)


def trusting(*protocols: str) -> ssl.SSLContext:
    """A client's context that trusts the certificate."""
    context = ssl.create_default_context(cafile=PEM)
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


def serving() -> ssl.SSLContext:
    """A unit's context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


async def test_clients_are_served_and_units_asked_over_tls() -> None:
    async with stage(STREAM, tls=TO_CLIENTS) as here, here.client(trusting("h2", "http/1.1")) as client:
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        for _ in range(3):
            reply = await client.ask(chat())
            assert (reply.status, reply.body, reply.whole) == (200, EVENTS, True)
        assert here.unit.requests[0].get("x-forwarded-proto") == "https"
        reply = await client.ask(b"GET / HTTP/1.1\r\n\r\n")
        assert (reply.status, reply.get("connection")) == (400, "close")
        assert await client.rest() == b""
    async with stage(STREAM, tls=TO_UNITS, unit_tls=serving()) as here, here.client() as client:
        for _ in range(3):
            reply = await client.ask(chat())
            assert (reply.status, reply.body, reply.whole) == (200, EVENTS, True)
        assert here.unit.requests[0].get("host") == f"localhost:{here.unit.port}"
        assert len(here.unit.connections) == 1


async def test_a_unit_that_cannot_prove_its_name_is_not_asked() -> None:
    stranger = ssl.create_default_context()
    async with stage(STREAM, tls=TO_UNITS, unit_tls=serving()) as here, here.client() as client:
        here.gateway.services.pool(here.plane.board.units["u0"])._tls = lambda: stranger
        asyncio.get_running_loop().set_exception_handler(None)
        reply = await client.ask(chat())
        assert (reply.status, reply.error["code"]) == (503, "unreachable")
        because = here.plane.board.units["u0"].case.because
        assert because is not None
        assert because.reason.startswith("TLS with localhost:")
        assert here.received == 0


async def test_large_bodies_and_slow_readers_over_tls() -> None:
    body = b"x" * (4 << 20)
    script = whole(body)
    async with stage(script, tls=BOTH, unit_tls=serving()) as here, here.client(trusting()) as client:
        client.stop_reading()
        client.send(chat(stream=False, pad="x" * (2 << 20)))
        await here.unit.received()
        await asyncio.sleep(0.1)
        client.read_on()
        reply = await client.reply()
        assert reply.whole
        assert reply.body == body


async def test_a_client_that_leaves_is_noticed_over_tls() -> None:
    async def play(request: Received) -> None:
        request.write(SSE_HEAD + chunk(TOKENS[0]))
        await asyncio.sleep(60.0)

    async with stage(play, tls=BOTH, unit_tls=serving()) as here, here.client(trusting()) as client:
        client.send(chat())
        await client.event()
        client.abort()
        await here.unit.connections[0].until_gone()
        await here.until(lambda: here.outcomes == ["client_left"])


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_cut_can_be_told_from_an_end_over_tls(version: bytes) -> None:
    script = then_close(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"{"))
    async with stage(script, tls=BOTH, unit_tls=serving()) as here, here.client(trusting()) as client:
        try:
            reply = await client.ask(chat(stream=False).replace(b"HTTP/1.1", b"HTTP/" + version))
            assert not reply.whole
        except ssl.SSLError:
            pass
        assert here.outcomes == ["truncated"]


async def test_plain_http_to_a_tls_port_is_nobodys_request() -> None:
    async with stage(STREAM, tls=TO_CLIENTS) as here, here.client() as client:
        client.send(chat())
        assert b"HTTP" not in await client.rest()
        assert (here.received, here.records.kept) == (0, [])


async def test_a_handshake_that_stalls_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellgate.proxy.process.listeners.LIMITS", replace(LIMITS, tls_handshake_s=0.05))
    async with stage(STREAM, tls=TO_CLIENTS) as here, here.client() as plain:
        plain.send(b"\x16\x03\x01")
        # What was not read yet makes a reset of its end.
        with suppress(ConnectionResetError):
            assert await plain.rest() == b""
        async with here.client(trusting()) as client:
            assert (await client.ask(chat())).status == 200


# Certificates that change while the gate runs: who shows which, and what becomes of bad files.


class Files:
    """The files that a gate has, and two authorities that can fill them."""

    def __init__(self, folder: Path) -> None:
        self.ours = Certificate(str(folder / "tls.crt"), str(folder / "tls.key"))
        self.authorities = [authority(folder, f"ca{number}") for number in (0, 1)]
        self.signed = [signed_by(ca, folder, f"gate{number}") for number, ca in enumerate(self.authorities)]
        self.put(0)

    def put(self, number: int) -> None:
        """Replace certificate and key."""
        for source, target in zip(self.signed[number], self.ours, strict=True):
            shutil.copyfile(source, target)

    def put_a_mismatch(self) -> None:
        """A certificate without its key."""
        shutil.copyfile(self.signed[1].cert, self.ours.cert)
        shutil.copyfile(self.signed[0].key, self.ours.key)

    def trusting(self, number: int) -> ssl.SSLContext:
        """A client that knows one authority."""
        return ssl.create_default_context(cafile=self.authorities[number].cert)


async def shown(port: int, tls: ssl.SSLContext) -> bool:
    """Whether who listens there has a certificate that `tls` accepts."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    except ssl.SSLError:
        return False
    writer.close()
    return True


def settle(tls: LiveTls) -> None:
    """Time passes."""
    tls.tick(0.0)
    tls.tick(0.0)


async def test_a_new_certificate_is_shown_to_the_next_client(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = Files(tmp_path_factory.mktemp("tls"))
    tls = LiveTls(Tls(cert=files.ours.cert, key=files.ours.key))
    server = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, "127.0.0.1", 0, ssl=tls.clients()
    )
    port = server.sockets[0].getsockname()[1]
    old, new = files.trusting(0), files.trusting(1)
    assert (await shown(port, old), await shown(port, new)) == (True, False)
    files.put_a_mismatch()
    refused = TALLIES[RELOADS, "certificates", "refused"]
    settle(tls)
    assert TALLIES[RELOADS, "certificates", "refused"] == refused + 1
    assert (await shown(port, old), await shown(port, new)) == (True, False)
    files.put(1)
    settle(tls)
    assert (await shown(port, old), await shown(port, new)) == (False, True)
    server.close()


def test_other_authorities_and_files_are_taken_and_a_quiet_process_reports_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path)
    ca = tmp_path / "ca.crt"
    shutil.copyfile(files.authorities[0].cert, ca)
    tls = LiveTls(Tls(ca=str(ca)))
    before = tls.units()
    assert tls.units() is before
    shutil.copyfile(files.authorities[1].cert, ca)
    settle(tls)
    assert tls.units() is not before
    (known,) = tls.units().get_ca_certs()
    assert "'ca1'" in str(known["subject"]), "the one that was replaced is no longer trusted"
    # Other files come with the configuration, and clients keep TLS.
    tls = LiveTls(Tls(cert=files.ours.cert, key=files.ours.key), is_quiet=True)
    tls.take(Tls(ca=files.authorities[0].cert))
    assert tls.clients() is not None
    assert len(tls.units().get_ca_certs()) == 1
    tls = LiveTls(Tls(cert=files.ours.cert, key=files.ours.key), is_quiet=True)
    tallies = dict(TALLIES)
    files.put_a_mismatch()
    settle(tls)
    assert tallies == TALLIES
