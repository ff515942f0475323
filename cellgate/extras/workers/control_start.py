"""The start of the control process: an app around its control plane, as in a gate of one process.

In this order: `ControlStart`, `run_control`.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from cellgate.extras.workers.control_process import ControlProcess, WorkerMetrics
from cellgate.extras.workers.worker import SupervisorChannel
from cellgate.proxy.admin.health_process import SharedStatus
from cellgate.proxy.app import App, Starter, live
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Reload, Settings, after_reload
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.handover import LISTEN, Inheritance, Listeners, listening_for
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.signals import Signals, Ticker
from cellgate.proxy.process.tls import LiveTls


@dataclass(frozen=True, slots=True)
class ControlStart:
    """What a control process is started with.

    `channel` leads to the supervisor, `heritage` to the previous gate; `restarts`: the number of control
    processes that have ended; `beat` is called with the loop's time as a sign of life; `reloaded`: the units
    may differ from those in `settings`.
    """

    settings: Settings
    reload: Reload
    tls: LiveTls
    listeners: Listeners
    channel: socket.socket
    heritage: Inheritance | None
    restarts: int
    beat: Callable[[float], None]
    reloaded: bool


async def run_control(start: ControlStart) -> int:
    """Run the control process of a gate with workers until it is told to end."""
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
    plane.metrics.include(WorkerMetrics(control, start.restarts).collect)
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
        fresh = reload()
    except ConfigError as error:
        log_line("error", f"the units of the start are kept: {'; '.join(error.problems)}")
        return settings
    return after_reload(settings, fresh)
