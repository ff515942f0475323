"""A worker as a process."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Sequence

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.logs.access_log import AccessLog, stdout_sink
from cellgate.proxy.logs.defects import DEFECTS
from cellgate.proxy.logs.log_writer import LogSink
from cellgate.proxy.process.garbage import calm_the_collector
from cellgate.proxy.process.signals import Signals
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.request.large_bodies import LargeBodies
from cellgate.proxy.tracing.start import trace
from cellgate.proxy.workers.accept_balance import Page
from cellgate.proxy.workers.neighbours import Neighbours
from cellgate.proxy.workers.supervisor_channel import SupervisorChannel
from cellgate.proxy.workers.worker import Worker

LINES_BYTES = 4096
"""What a pipe takes as one piece (PIPE_BUF), so that lines of several workers do not mix."""


class WholeLines:
    """A sink that many processes write to: it gets whole lines, as many at once as stay in one piece."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink

    def write(self, data: memoryview, /) -> int | None:
        """Write the first lines of `data`; how many bytes were taken."""
        head = bytes(data[:LINES_BYTES])
        end = head.rfind(b"\n") + 1 if len(data) > LINES_BYTES else len(head)
        return self._sink.write(data[: end or LINES_BYTES])


async def run_worker(
    settings: Settings,
    tls: LiveTls,
    listeners: Sequence[socket.socket],
    channel: socket.socket,
    page: Page,
    number: int,
    neighbours: Neighbours,
) -> int:
    """Run worker `number` until it is told to end; `channel` leads to the supervisor."""
    loop, large = asyncio.get_running_loop(), LargeBodies()
    loop.set_exception_handler(DEFECTS.handle)
    log = AccessLog(settings.access_log, WholeLines(stdout_sink()), time.time)
    worker = Worker(
        settings,
        loop,
        random.Random(),
        access_log=log,
        read=large.read,
        tls=tls,
        page=page,
        number=number,
        neighbours=neighbours,
    )
    tracing = trace(settings.tracing)
    if tracing is not None:
        tracing.watch(worker.gateway)
    supervisor = SupervisorChannel(channel)
    supervisor.on_socket = _meeting(worker)
    life = Signals(
        worker,
        settings.timeouts,
        lambda: None,
        _handed_over,
        on_signal=supervisor.on_signal,
        # The control process reports it for all.
        tell=lambda _level, _line: None,
    )
    supervisor.open()
    worker.begin()
    accepting = loop.create_task(worker.accept(listeners))
    calm_the_collector()
    try:
        await life.run()
    finally:
        accepting.cancel()
        await large.close()
        if tracing is not None:
            tracing.close()
    return 0


def _meeting(worker: Worker) -> Callable[[int, socket.socket], None]:
    """What is done with a socket that leads to a control process."""
    tasks = set[asyncio.Task[None]]()

    def meet(_: int, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(worker.control.meet().connect(sock))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return meet


async def _handed_over() -> bool:
    """The supervisor passes SIGUSR2 on to workers once there is a successor."""
    return True
