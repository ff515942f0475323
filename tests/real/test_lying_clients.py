"""Real ingresses with the project's configurations, and a client that says what is not its to say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.real.asking import post, until
from tests.real.envoy import envoy
from tests.real.haproxy import haproxy
from tests.real.nginx import nginx
from tests.real.tiny_gate import TinyGate, listening
from tests.said_fields import INTERNAL_REPLY_FIELDS, MEANINGS, Said
from tests.wire.stage import live

LIE = "203.0.113.9"
STATE = "UP 2/3; name=gates/gate1; node=evil{}; weight=1/2; scur=1/2; qcur=0"


@contextmanager
def _haproxy(folder: Path, gates: list[TinyGate]) -> Iterator[int]:
    with haproxy(folder, dict(zip(("10.0.0.1", "10.0.0.2"), gates, strict=True))) as here:
        yield here.port


@contextmanager
def _haproxy_units(folder: Path, gates: list[TinyGate]) -> Iterator[int]:
    changed = {"server a1 ": "server u ", '"a1 ': '"u '}
    addresses = dict(zip(("10.0.0.1", "10.0.0.2"), gates, strict=True))
    with haproxy(folder, addresses, configuration="haproxy-units.cfg", changed=changed) as here:
        yield here.port


@contextmanager
def _nginx(folder: Path, gates: list[TinyGate]) -> Iterator[int]:
    with nginx(folder, [gate.port for gate in gates]) as port:
        yield port


@contextmanager
def _envoy(folder: Path, gates: list[TinyGate]) -> Iterator[int]:
    with envoy(folder, [gate.port for gate in gates]) as here:
        yield here.port


async def say(port: int, lines: str) -> str:
    """The head of the answer to a POST with these lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{lines}content-length: 0\r\n\r\n".encode()
    )
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    finally:
        writer.close()


@pytest.mark.parametrize("ingress", [_haproxy, _haproxy_units, _nginx, _envoy])
@live
async def test_what_clients_may_not_say_does_not_arrive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ingress: Callable[[Path, list[TinyGate]], AbstractContextManager[int]],
) -> None:
    monkeypatch.setenv("CELLGATE_ADMIN_TOKEN", "s3cret")
    gates = [TinyGate(), TinyGate()]
    names = {who: [name.decode() for name, by in MEANINGS.items() if by is who] for who in Said}
    lies = names[Said.BY_OPERATOR] + names[Said.BY_INGRESS]
    async with listening(*gates):
        with ingress(tmp_path, gates) as port:
            await until(lambda: _is_served(port))
            for spelling in (str, str.upper, str.title):
                for gate in gates:
                    gate.heads.clear()
                told = await say(port, "".join(f"{spelling(name)}: {LIE}\r\n" for name in lies))
                assert told.startswith("http/1.1 200")
                shown = [name.decode() for name in INTERNAL_REPLY_FIELDS if f"\r\n{name.decode()}:" in told]
                assert shown == []
                (head,) = [head for gate in gates for head in gate.heads]
                assert _is_of_this_machine(head["x-forwarded-for"].split(",")[-1].strip())
                believed = {name for name in lies if LIE in head.get(name, "")}
                assert believed <= {"x-forwarded-for"}


@live
async def test_no_client_can_make_balancers_up(tmp_path: Path) -> None:
    gates = [TinyGate(), TinyGate()]
    async with listening(*gates):
        with _haproxy(tmp_path, gates) as port:
            await until(lambda: _is_served(port))
            for number in range(56):
                await say(port, f"X-Haproxy-Server-State: {STATE.format(number)}\r\n")
            for gate in gates:
                await until(partial(_has_asked, gate, gate.agent.counts["up"]))
                assert gate.balancers.count("gate", gate.now()) == 1


def _is_of_this_machine(address: str) -> bool:
    """Envoy says an address of its own for a client on the same machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
    return True


def _has_asked(gate: TinyGate, before: int) -> bool:
    return gate.agent.counts["up"] > before


async def _is_served(port: int) -> bool:
    return await post(port) == 200
