"""Does what a remedy says: one table of the ways to act on a unit."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import orjson

from cellgate.proxy.config.action_settings import (
    CallWebhook,
    Remedy,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RunCommand,
    SetImage,
)
from cellgate.proxy.extras.operator.plan import Act, Incident, RecoveryReport, RecoveryResult
from cellgate.proxy.extras.operator.recovery import environment

# Runs a command for a unit: no shell, limited in time and output, killed with all its child processes.
#
# It gets the incident as JSON on its standard input, and most of it in environment variables.


OUTPUT_KEPT = 4096
FLOOD_BYTES = 1024 * 1024
"""A command that prints more is killed, because reading it would delay the gate's streams."""
REAP_S = 5.0
_READ_BYTES = 64 * 1024


class _Output:
    """Both outputs of a command. Keeps the end; `flooded` becomes true when there is too much."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.flooded = asyncio.Event()
        self._size = 0
        self._end = b""
        loop.add_reader(self._reading, self._read)

    def text(self) -> str:
        """The end of what was printed."""
        return self._end.decode("utf-8", "replace")

    def close(self) -> None:
        """Read what is available: a background child may hold the other end open for ever."""
        if not self.flooded.is_set():
            self._read()
        self._loop.remove_reader(self._reading)
        os.close(self._reading)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._reading, _READ_BYTES)
            self._size += len(data)
            self._end = (self._end + data)[-OUTPUT_KEPT:]
            if not data or self._size > FLOOD_BYTES:
                self._loop.remove_reader(self._reading)
            if self._size > FLOOD_BYTES:
                self.flooded.set()


async def run_command(action: RunCommand, about: Incident, timeout_s: float) -> RecoveryReport:
    """Run a command to its end, or to its timeout. Cancelled, it is killed as well."""
    loop = asyncio.get_running_loop()
    output = _Output(loop)
    try:
        process = await _start(action.words, about, output.writing)
    except (OSError, ValueError) as error:
        os.close(output.writing)
        output.close()
        return RecoveryReport(RecoveryResult.FAILED, f"{action.words[0]} could not be started: {error}")
    os.close(output.writing)
    ending = [loop.create_task(process.wait()), loop.create_task(output.flooded.wait())]
    try:
        await asyncio.wait(ending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if process.returncode is None:
            await _kill(process)
            killed = True
        else:
            killed = False
        for task in ending:
            task.cancel()
        output.close()
    return _report(timeout_s, process.returncode, output, killed=killed)


def _report(timeout_s: float, code: int | None, output: _Output, *, killed: bool) -> RecoveryReport:
    text = output.text()
    if output.flooded.is_set():
        return RecoveryReport(
            RecoveryResult.FLOODED, f"killed: it printed more than {FLOOD_BYTES} bytes", text
        )
    if killed:
        return RecoveryReport(RecoveryResult.TIMEOUT, f"killed: it did not end within {timeout_s:g} s", text)
    if code == 0:
        return RecoveryReport(RecoveryResult.OK, "it exited with 0", text)
    how = f"it exited with {code}" if code is None or code > 0 else f"it was killed by signal {-code}"
    return RecoveryReport(RecoveryResult.FAILED, how, text)


async def _start(words: Sequence[str], about: Incident, output: int) -> asyncio.subprocess.Process:
    # In memory and not a pipe: a command that does not read it must not block the gate.
    told = os.memfd_create("incident")
    try:
        with os.fdopen(os.dup(told), "wb") as file:
            file.write(orjson.dumps(about))
        os.lseek(told, 0, os.SEEK_SET)
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=told,
            stdout=output,
            stderr=output,
            env=environment(about, os.environ),
            # A group of its own, to be killed as one.
            start_new_session=True,
        )
    finally:
        os.close(told)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that sleeps in the kernel may not have ended yet; do not wait longer for it.
    with suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await process.wait()


_ORCHESTRATED: Mapping[type, tuple[str, str]] = {
    ReplacePods: ("kubernetes", "replace_pods"),
    SetImage: ("kubernetes", "set_image"),
    ReplaceTasks: ("ecs_tasks", "replace_tasks"),
}
"""Modules beside this one, each with the function for an action that an orchestrator carries out."""


def action_runner(tls: Callable[[], ssl.SSLContext]) -> Act:
    """Carries out remedies; `tls` creates the context that verifies webhooks."""

    async def act(remedy: Remedy, about: Incident) -> RecoveryReport:
        match remedy.action:
            case RunCommand():
                return await run_command(remedy.action, about, remedy.timeout_s)
            case RestartService():
                return await run_command(remedy.action.command(about["unit"]), about, remedy.timeout_s)
            case CallWebhook():
                webhook = await _module("webhook")
                report: RecoveryReport = await webhook.caller(tls())(remedy.action, about, remedy.timeout_s)
                return report
        name, function = _ORCHESTRATED[type(remedy.action)]
        run = getattr(await _module(name), function)
        try:
            async with asyncio.timeout(remedy.timeout_s):
                report = await run(remedy.action, about)
        except TimeoutError:
            detail = f"not finished within {remedy.timeout_s:g} s; a part may have been done"
            return RecoveryReport(RecoveryResult.TIMEOUT, detail)
        return report

    return act


async def _module(name: str) -> Any:
    # Imported late: HTTP clients take 10 MB, which most gates do not need.
    return await asyncio.to_thread(import_module, f"cellgate.proxy.extras.operator.{name}")
