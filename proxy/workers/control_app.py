"""The brain as a process: all parts of a gate but those that have to do with clients."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cellgate.proxy.admin.shared_status import Bulletin
from cellgate.proxy.app import LISTEN, App, Reload, live
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.handover.inheritance import Inheritance
from cellgate.proxy.handover.successor import Listeners
from cellgate.proxy.logs.access_log import stdout_sink
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.process.signals import Life
from cellgate.proxy.process.tls import unit_context
from cellgate.proxy.workers.control_process import BrainGate, LogsOfWorkers
from cellgate.proxy.workers.figures import WorkerMetrics
from cellgate.proxy.workers.supervisor_channel import Control


class BrainApp(App):
    """The parts of a gate that is asked by workers."""

    _gate: BrainGate

    def __init__(
        self,
        settings: Settings,
        reload: Reload,
        listeners: Listeners,
        control: Control,
        restarts: int,
        beat: Callable[[float], None],
    ) -> None:
        self._control = control
        self._restarts = restarts
        super().__init__(settings, reload, listeners)
        self._gate.metrics.include(WorkerMetrics(self._gate, restarts))
        self._gate.on_tick.append(beat)
        beat(self._gate.now())
        self._meetings: set[asyncio.Task[None]] = set()
        control.on_socket = self._meet
        control.open()

    def _make_gate(self, bulletin: Bulletin) -> BrainGate:
        settings = self._settings
        return BrainGate(
            settings,
            asyncio.get_running_loop(),
            random.Random(),
            events=self._events,
            logs=LogsOfWorkers("off", stdout_sink(), time.time),
            read_large=self._large.read,
            publish=bulletin.publish,
            unit_tls=partial(unit_context, settings.tls),
            listeners=self._listening_for(LISTEN),
            is_first=not self._restarts,
        )

    def _make_life(self) -> Life:
        control, timeouts = self._control, self._settings.timeouts
        return Life(
            self._gate,
            timeouts,
            self._take_settings,
            self._hand_over,
            on_signal=control.on_signal,
            pid=os.getppid(),
        )

    async def _let_clients_in(self) -> None:
        self._gate.let_clients_in()
        await self._life.wait_for(self._gate.all_accept)

    def _announce(self) -> None:
        # It may have been told to end before that.
        if self._gate.all_accept.is_set():
            super()._announce()
            self._control.ready()

    def _notify(self, *words: str) -> None:
        self._control.notify(*words)

    def _meet(self, worker: int, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._gate.meet(worker).connect(sock))
        self._meetings.add(task)
        task.add_done_callback(self._meetings.discard)


async def run_brain(
    settings: Settings,
    reload: Reload,
    listeners: Listeners,
    control: socket.socket,
    heritage: Inheritance | None,
    restarts: int,
    beat: Callable[[float], None],
) -> int:
    """Be the brain until told to end. `restarts`: so many brains ended before this one.

    `beat` is called, with the loop's time, as long as it is alive.
    """
    line = Control(control)
    return await live(BrainApp(settings, reload, listeners, line, restarts, beat), heritage)


def read_anew(settings: Settings, reload: Reload) -> Settings:
    """What the brain before this one may have been told by SIGHUP; only units and cells may be others."""
    try:
        anew = reload()
    except ConfigError as error:
        log_line("error", f"the units are those of the start: {'; '.join(error.problems)}")
        return settings
    return replace(settings, fleet=anew.fleet, sources=anew.sources, remedies=anew.remedies)
