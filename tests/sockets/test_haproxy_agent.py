"""The agent port over real sockets: what is asked well, badly, late, and by whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cellgate.proxy.config.settings import Address
from cellgate.proxy.ingress import haproxy
from cellgate.proxy.ingress.haproxy import Balancers, HaproxyAgent
from cellgate.proxy.process.listeners import listen
from cellgate.router.nouns import Rules, Unit
from tests.unit.router.fleets import board_up

GATE_UP = b"up ready 100% maxconn:32\n"
UNIT_UP = b"up ready 100% maxconn:16\n"


class Port:
    """An agent port before two units that are UP, and whoever asks there."""

    def __init__(self) -> None:
        units = (Unit(name, "c", f"http://{name}", max_in_flight=16) for name in ("u1", "u2"))
        self.board = board_up(*units, rules=Rules(slow_start_s=0.001))
        self.stopping = False
        self.welcome = True
        self.agent = HaproxyAgent(
            self.board, lambda: 100.0, lambda: self.stopping, lambda _: self.welcome, Balancers()
        )
        self.port = 0

    async def ask(self, *parts: bytes, pause_s: float = 0.0, eof: bool = False) -> bytes:
        """All that comes back for what is said."""
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(pause_s)
                if eof:
                    writer.write_eof()
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.transport.abort()


@asynccontextmanager
async def port() -> AsyncIterator[Port]:
    """A port that listens."""
    here = Port()
    listeners = await listen(Address("127.0.0.1", 0), 16)
    here.port = listeners[0].getsockname()[1]
    await here.agent.start(listeners)
    try:
        yield here
    finally:
        await here.agent.close()


async def test_a_line_asks_for_a_unit_or_the_gate() -> None:
    async with port() as here:
        assert await here.ask(b"u1\n") == UNIT_UP
        assert await here.ask(b"gate\n") == GATE_UP
        assert await here.ask(b"u1\r\n") == UNIT_UP
        assert await here.ask(b"u", b"1", b"\n", pause_s=0.01) == UNIT_UP
        here.board.drain("u1", drained=True)
        assert await here.ask(b"u1\n") == b"drain\n"
        # A unit that nobody knows is drained, as on its health URL.
        assert await here.ask(b"u9\n") == b"drain\n"
        assert (here.agent.counts["up"], here.agent.counts["unknown"]) == (4, 1)
        # A gate that stops drains itself, and says of its units what is so.
        here.stopping = True
        assert await here.ask(b"gate\n") == b"drain\n"
        assert await here.ask(b"u2\n") == UNIT_UP


async def test_strangers_and_what_is_no_question_get_no_answer_least_of_all_down() -> None:
    async with port() as here:
        questions = [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"u1 u2 u3\n", b"\x16\x03\x01\n", b"u1\nu2\n"]
        for question in (*questions, b"x" * 5000, b"-\n"):
            assert await here.ask(question) == b"", question
        assert here.agent.counts["malformed"] == 7
        here.welcome = False
        assert await here.ask(b"u1\n") == b""
        assert here.agent.counts["refused"] == 1


async def test_who_says_nothing_is_told_of_the_gate_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "QUESTION_WAIT_S", 0.05)
    async with port() as here:
        assert await here.ask() == GATE_UP
        assert await here.ask(b"u1") == UNIT_UP


async def test_who_ends_without_a_line_end_has_asked_who_ends_without_a_word_has_not() -> None:
    async with port() as here:
        assert await here.ask(b"u1", eof=True) == UNIT_UP
        assert await here.ask(eof=True) == b""
        assert sum(here.agent.counts.values()) == 1


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "CONNECTIONS_MAX", 2)
    async with port() as here:
        held = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(2)]
        assert await here.ask(b"u1\n") == b""
        assert here.agent.counts["too_many"] == 1
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.01)
        assert await here.ask(b"u1\n") == UNIT_UP


async def test_closing_leaves_nobody_waiting() -> None:
    async with port() as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        await asyncio.sleep(0.01)
        await here.agent.close()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
