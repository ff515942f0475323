"""The entry: starts the processes of a gate from its settings, and creates the parts of each."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from typing import TYPE_CHECKING

import uvloop

from cellgate.proxy.admin.shared_status import SharedStatus
from cellgate.proxy.app import App, Starter, live
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Reload, Settings, after_reload
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.discovery.start import preload
from cellgate.proxy.gate import make_gate
from cellgate.proxy.handover.inheritance import Inheritance, inherit
from cellgate.proxy.handover.open_listeners import LISTEN, listeners_of, listening_for
from cellgate.proxy.logs.access_log import AccessLog, stdout_sink
from cellgate.proxy.logs.events import EventLog
from cellgate.proxy.logs.log import configure, log_line
from cellgate.proxy.process import descriptors
from cellgate.proxy.process.malloc import return_large_blocks
from cellgate.proxy.process.signals import Signals
from cellgate.proxy.process.ticker import Ticker
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.request.large_bodies import LargeBodies
from cellgate.proxy.tracing.start import trace

if TYPE_CHECKING:
    from cellgate.proxy.workers.supervisor import ControlStart


def serve(settings: Settings, reload: Reload) -> int:
    """Run a gate until it is told to stop; returns the exit code. What signals mean: process/signals.py.

    Raises ConfigError when there are too few file descriptors, OSError when it cannot listen,
    NoInheritanceError when the inheritance from the previous gate did not arrive.
    """
    descriptors.check(settings.workers)
    configure("json" if settings.access_log == "json" else "console")
    return_large_blocks()
    preload(settings)
    if settings.workers > 1:
        from cellgate.proxy.workers.supervisor import (
            supervise,
        )  # Imported late, because a gate of one process does not need it.

        return supervise(settings, reload, inherit(), run_control)
    return uvloop.run(_serve(settings, reload, inherit()))


async def _serve(settings: Settings, reload: Reload, heritage: Inheritance | None) -> int:
    """Run a gate of one process until it is told to end."""
    listeners = await listeners_of(settings, heritage)
    large, shared_status, tracing = LargeBodies(), SharedStatus(), trace(settings.tracing)
    tls = LiveTls(settings.tls)
    gate = make_gate(
        settings,
        asyncio.get_running_loop(),
        random.Random(),
        events=EventLog(time.time, settings.rules.passes),
        access_log=AccessLog(settings.access_log, stdout_sink(), time.time),
        read=large.read,
        publish=shared_status.publish,
        unit_tls=tls.units,
    )
    if tracing is not None:
        tracing.watch(gate.gateway)

    async def let_clients_in(_: Signals) -> bool:
        await gate.gateway.listen(tls.clients(), listening_for(listeners, LISTEN))
        return True

    app = App(settings, reload, tls, listeners, gate, shared_status, let_clients_in)
    try:
        return await live(app, heritage)
    finally:
        await large.close()
        if tracing is not None:
            tracing.close()


async def run_control(start: ControlStart) -> int:
    """Run the control process of a gate with workers until it is told to end."""
    from cellgate.proxy.workers.control_process import ControlProcess
    from cellgate.proxy.workers.supervisor_channel import SupervisorChannel
    from cellgate.proxy.workers.worker_metrics import WorkerMetrics

    loop, listeners = asyncio.get_running_loop(), start.listeners
    settings = _read_anew(start.settings, start.reload) if start.reloaded else start.settings
    shared_status, channel = SharedStatus(), SupervisorChannel(start.channel)
    plane = Plane(
        settings,
        loop,
        random.Random(),
        Ticker(loop),
        events=EventLog(time.time, settings.rules.passes),
        publish=shared_status.publish,
        unit_tls=start.tls.units,
    )
    held = listening_for(listeners, LISTEN)
    control = ControlProcess(plane, loop, listeners=held, is_first=not start.restarts)

    async def let_clients_in(life: Signals) -> bool:
        control.let_clients_in()
        await life.wait_for(control.all_accept)
        # It may have been told to end already.
        return control.all_accept.is_set()

    starter = Starter(channel.notify, channel.ready, channel.reloaded, channel.on_signal, os.getppid())
    app = App(settings, start.reload, start.tls, listeners, control, shared_status, let_clients_in, starter)
    plane.metrics.include(WorkerMetrics(control, start.restarts))
    plane.ticker.looks.append(start.beat)
    start.beat(plane.now())
    meetings: set[asyncio.Task[None]] = set()

    def meet(worker: int, sock: socket.socket) -> None:
        task = loop.create_task(control.meet(worker).connect(sock))
        meetings.add(task)
        task.add_done_callback(meetings.discard)

    channel.on_socket = meet
    channel.open()
    return await live(app, start.heritage)


def _read_anew(settings: Settings, reload: Reload) -> Settings:
    """The settings after a reload by the previous control process."""
    try:
        anew = reload()
    except ConfigError as error:
        log_line("error", f"the units of the start are kept: {'; '.join(error.problems)}")
        return settings
    return after_reload(settings, anew)
