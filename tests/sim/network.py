"""The network of the simulated world: who listens, who is connected, and how connections come and go.

Hosts are IP addresses in one flat space; `names` is the resolver's table. What the world opens for itself
(engines, clients) is marked `is_outside`, so that what the program under test leaves open can be told from
the furniture.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import Any

from tests.sim.faults import NEVER_ANSWERS, Faults, places
from tests.sim.loop import SimLoop
from tests.sim.tcp import Address, Lane, Socket, socket_pair
from tests.sim.trace import Trace
from tests.sim.transport import SimTransport

Factory = Callable[[], asyncio.BaseProtocol]

GATE = "10.0.0.1"
CLIENT = "10.0.0.2"
HERE: ContextVar[str] = ContextVar("HERE", default=GATE)  # The host that the running code is on.
WILDCARDS = ("", "0.0.0.0", "::")


class Listener:
    """Where connections to one address go."""

    def __init__(self, address: Address, factory: Factory, context: Context, *, is_outside: bool) -> None:
        self.address = address
        self.factory = factory
        self.context = context
        self.is_outside = is_outside

    def getsockname(self) -> Address:
        return self.address


class Server:
    """What `create_server` returns, closing as uvloop's does: established connections go on."""

    def __init__(self, network: Network, listener: Listener) -> None:
        self._network = network
        self._listener = listener

    @property
    def sockets(self) -> tuple[Listener, ...]:
        return (self._listener,) if self.is_serving() else ()

    def is_serving(self) -> bool:
        return self._network.listeners.get(self._listener.address) is self._listener

    def close(self) -> None:
        if self.is_serving():
            del self._network.listeners[self._listener.address]

    async def wait_closed(self) -> None:
        """uvloop's returns at once after `close`, whatever connections live."""

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Network(Faults):
    """Listeners, connections and faults. Every random choice comes from `rng`."""

    def __init__(self, loop: SimLoop, rng: Random, trace: Trace) -> None:
        super().__init__()
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self.names |= {"gate": [GATE], "client": [CLIENT]}
        self.listeners: dict[Address, Listener] = {}
        self.transports: dict[SimTransport, bool] = {}  # to whether the world owns it
        self.held: list[Lane] = []  # The lanes that a partition has stopped.
        self._ports = count(40_000)
        self._hosts = count(len(self.names))
        loop.network = self

    def add_host(self, name: str) -> str:
        """Give a name an IP address of its own."""
        number = next(self._hosts)
        ip = f"10.1.{number // 250}.{number % 250 + 1}"
        self.names[name] = [ip]
        return ip

    def remove_host(self, name: str) -> None:
        """The host is gone: nothing listens there, its connections are reset, nobody knows its name."""
        here = self.canonical(name)
        self.listeners = {a: x for a, x in self.listeners.items() if here not in places(a)}
        self.reset(here)
        self.heal(here)
        del self.names[name]

    # The active faults

    def reset(self, place: str) -> None:
        """Reset every connection that ends at the place; both ends see ConnectionResetError."""
        self.trace.note("reset", place)
        for transport in self._at(place):
            transport.sock.break_off()

    def kill(self, place: str) -> None:
        """What listens at the place is gone, its connections are reset, new ones are refused."""
        where = self.canonical(place)
        self.listeners = {a: x for a, x in self.listeners.items() if where not in places(a)}
        self.reset(place)

    def heal(self, place: str | None = None, *, reset: bool = False) -> None:
        """Undo the place's faults, or all. Held packets arrive, or with `reset` break their connections."""
        super().heal(place)
        held, self.held = self.held, []
        for lane in held:
            lane.resume()
        if reset:
            broken = {lane.source for lane in held} | {lane.target for lane in held}
            for transport in self.transports:
                if transport.sock.local in broken and transport.sock.remote in broken:
                    transport.sock.break_off()

    def _at(self, place: str) -> list[SimTransport]:
        where = self.canonical(place)
        return [transport for transport in self.transports if where in places(transport.sock.local)]

    # What the loop asks for

    async def resolve(self, host: str) -> list[str]:
        """The host's addresses. Raises socket.gaierror for a name that is unknown or made to fail."""
        if host[:1].isdigit():
            return [host]
        answered: asyncio.Future[None] = self.loop.create_future()
        self.loop.outside(self.default_link.latency_s[1], _answer, answered)
        await answered
        if host in self._unresolvable:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.names[host]

    def listen(self, factory: Factory, host: str | None, port: int, *, is_outside: bool = False) -> Server:
        """Listen at an address; port 0 takes a free one. Raises OSError (EADDRINUSE)."""
        address = (self.canonical(host or ""), port or next(self._ports))
        if address in self.listeners:
            raise OSError(
                errno.EADDRINUSE,
                f"error while attempting to bind on address {address}: address already in use",
            )
        listener = Listener(address, factory, copy_context(), is_outside=is_outside)
        self.listeners[address] = listener
        return Server(self, listener)

    async def connect(
        self, factory: Factory, host: str, port: int, *, source: str | None = None, is_outside: bool = False
    ) -> tuple[SimTransport, Any]:
        """Connect from `source`, by default the host that this code is on. Raises OSError as uvloop does."""
        protocol = factory()
        errors: list[OSError] = []
        for ip in await self.resolve(host):
            near, far = socket_pair(self, (source or HERE.get(), next(self._ports)), (ip, port))
            try:
                return await self._connect_one(near, far, protocol, is_outside), protocol
            except OSError as error:
                errors.append(error)
        if len({str(error) for error in errors}) == 1:
            raise errors[0]
        raise OSError(f"Multiple exceptions: {', '.join(map(str, errors))}")

    async def _connect_one(
        self, near: Socket, far: Socket, protocol: asyncio.BaseProtocol, is_outside: bool
    ) -> SimTransport:
        self.trace.note("connect", near.local, near.remote)
        if self.is_exhausted(near.local):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        waiter: asyncio.Future[None] = self.loop.create_future()
        transport = self._open(near, protocol, copy_context(), is_outside, waiter)
        if self.connect_fault(near.local, near.remote) != NEVER_ANSWERS:
            near.lane.carry(self._syn, transport, far)
        try:
            await waiter
        except BaseException:
            transport.discard()
            raise
        return transport

    def _syn(self, transport: SimTransport, far: Socket) -> None:
        """The connect request has arrived: accept it or refuse it, and let the answer travel back."""
        fault = self.connect_fault(far.remote, far.local)
        listener = self._listener_at(far.local)
        if fault or listener is None:
            error = OSError(fault or errno.ECONNREFUSED, os.strerror(fault or errno.ECONNREFUSED))
            far.lane.carry(transport.discard, error)
            return
        accepted = self._open(
            far, listener.context.run(listener.factory), listener.context, listener.is_outside
        )
        accepted.start()
        far.lane.carry(transport.start)

    def _open(
        self, sock: Socket, protocol: asyncio.BaseProtocol, context: Context, is_outside: bool, *waiter: Any
    ) -> SimTransport:
        transport = SimTransport(self.loop, sock, protocol, context, self._forget, *waiter)
        self.transports[transport] = is_outside
        return transport

    def _forget(self, transport: SimTransport) -> None:
        self.trace.note("closed", transport.sock.local, transport.sock.remote)
        del self.transports[transport]

    def _listener_at(self, address: Address) -> Listener | None:
        exact = self.listeners.get(address)
        anywhere = (
            self.listeners[host, address[1]] for host in WILDCARDS if (host, address[1]) in self.listeners
        )
        return exact or next(anywhere, None)


def _answer(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
