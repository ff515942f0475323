"""The composition root: builds a gate from its settings and runs it until a signal. Knows every folder."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvloop

from proxy.config import ConfigError
from proxy.discovery.follow import Discovery
from proxy.discovery.start import discover
from proxy.gate import Gate
from proxy.large import LargeBodies
from proxy.recovery.recovery import Recovery
from proxy.recovery.start import attend
from proxy.report.access_log import AccessLog, stdout_sink
from proxy.report.admin import AdminView
from proxy.report.admin_port import AdminPort
from proxy.report.bulletin import Bulletin
from proxy.report.collectors import AgentCheckMetrics
from proxy.report.events import EventLog
from proxy.report.haproxy_agent import HaproxyAgent
from proxy.report.log import configure, log_line
from proxy.report.redis_link import RedisLink
from proxy.report.redis_start import share
from proxy.settings import Address, Settings, Tls

Reload = Callable[[], Settings]


def serve(settings: Settings, reload: Reload) -> int:
    """Run a gate until it is told to stop; returns the exit code. Raises OSError when it cannot listen.

    SIGTERM: stop in good order; a second one, or SIGINT: stop now. SIGHUP: read the units anew.
    """
    configure("json" if settings.access_log == "json" else "console")
    return uvloop.run(_serve(settings, reload))


async def _serve(settings: Settings, reload: Reload) -> int:
    loop = asyncio.get_running_loop()
    large = LargeBodies()
    events = EventLog(time.time, settings.rules.passes)
    bulletin = Bulletin()
    gate = Gate(
        settings,
        loop,
        random.Random(),
        events=events,
        access_log=AccessLog(settings.access_log, stdout_sink(), time.time),
        read_large=large.read,
        publish=bulletin.publish,
        unit_tls=unit_context(settings.tls),
    )
    view = AdminView(
        board=gate.board,
        events=events,
        metrics=gate.metrics,
        now=gate.now,
        stopping=gate.is_stopping,
        set_drain=gate.set_drain,
        token=settings.admin_token,
        peers=gate.peers,
        due_s=lambda unit, probe: gate.watch.due_s(unit, probe, gate.now()),
        waiting=lambda: len(gate.router.waiting),
    )
    admin = AdminPort(view, bulletin)
    agent = HaproxyAgent(gate.board, gate.now, gate.is_stopping, gate.peers.trusts, gate.balancers)
    link: RedisLink | None = None
    discovery: Discovery | None = None
    recovery: Recovery | None = None
    try:
        with _binding(settings.admin):
            await admin.open(settings.admin)
        with _binding(settings.listen):
            await gate.start(client_context(settings.tls))
        discovery = discover(gate)
        if (place := settings.agent_check) is not None:
            with _binding(place):
                await agent.start(place.host, place.port)
            gate.metrics.include(AgentCheckMetrics(agent))
        link = share(gate, settings.redis) if settings.redis is not None else None
        recovery = attend(gate, webhook_context(settings.tls))
        _announce(gate, admin)
        _calm_the_collector()
        await _until_stopped(gate, recovery, loop, reload)
    finally:
        if discovery is not None:
            await discovery.close()
        if recovery is not None:
            await recovery.close()
        if link is not None:
            await link.close()
        agent.close()
        events.close()
        await admin.close()
        large.close()
    return 0


async def _until_stopped(
    gate: Gate, recovery: Recovery, loop: asyncio.AbstractEventLoop, reload: Reload
) -> None:
    hurry, gently = asyncio.Event(), asyncio.Event()

    def terminate() -> None:
        (hurry if gently.is_set() else gently).set()

    def hang_up() -> None:
        try:
            settings = reload()
            gate.reload(settings)
            recovery.configure(settings.remedies)
        except ConfigError as error:
            log_line("error", f"reload refused, the units stay as they were: {'; '.join(error.problems)}")

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, hurry.set)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    asked = [loop.create_task(event.wait()) for event in (gently, hurry)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    timeouts = gate.settings.timeouts
    if not hurry.is_set():
        delay, drain = timeouts.drain_delay_s, timeouts.drain_s
        log_line(
            "info",
            f"stopping: not ready, accepting for {delay:g} s more, then answers end within {drain:g} s",
        )
        stopping = loop.create_task(gate.stop(delay_s=delay, drain_s=drain))
        await asyncio.wait([stopping, asked[1]], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        with suppress(asyncio.CancelledError):
            await stopping
    if hurry.is_set():
        log_line("info", "stopping now: connections are cut")
        await gate.stop(delay_s=0.0, drain_s=0.0)
    for task in asked:
        task.cancel()


@contextmanager
def _binding(address: Address) -> Iterator[None]:
    """Have an OSError say which address could not be had, and why in the system's own words."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise OSError(error.errno, reason, str(address)) from error


def _announce(gate: Gate, admin: AdminPort) -> None:
    host, port = admin.address
    names = ", ".join(f"{desk.unit.name} ({desk.unit.url})" for desk in gate.board)
    listen = gate.settings.listen
    log_line("info", f"listening on {listen.host}:{gate.port}, admin on {host}:{port}, units: {names}")


def _calm_the_collector() -> None:
    # What is alive now lives as long as the process, so collections need not look at it again; and requests
    # leave few cycles behind, so that young collections may be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def client_context(tls: Tls) -> ssl.SSLContext | None:
    """TLS towards clients, when a certificate is configured."""
    if tls.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["http/1.1"])
    return context


def webhook_context(tls: Tls) -> ssl.SSLContext:
    """TLS towards webhooks: verified by the system's authorities, and by the configured one."""
    context = ssl.create_default_context()
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
    return context


def unit_context(tls: Tls) -> ssl.SSLContext:
    """TLS towards https units: verified by the configured authority, or by the system's."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.unit_cert is not None:
        context.load_cert_chain(tls.unit_cert, tls.unit_key)
    return context
