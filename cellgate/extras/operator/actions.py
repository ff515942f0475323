"""Does what a remedy says: one table of the ways to act on a unit.

In this order: `action_runner`, `services_of`, `sign`, `run_command`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import signal
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import orjson

from cellgate.extras.operator.action_settings import (
    CallWebhook,
    Remedy,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RunCommand,
    SetImage,
)
from cellgate.extras.operator.kubernetes import replace_pods, set_image
from cellgate.extras.operator.plan import Act, Incident, RecoveryReport, RecoveryResult
from cellgate.extras.operator.recovery import environment
from cellgate.extras.orchestrators import (
    UNIT_TAG,
    AwsError,
    Task,
    connect,
    in_one_line,
    running_tasks,
    tags_of,
)
from cellgate.proxy.observe.text import one_line


def action_runner(tls: Callable[[], ssl.SSLContext]) -> Act:
    """Carries out remedies; `tls` creates the context that verifies webhooks."""

    async def act(remedy: Remedy, about: Incident) -> RecoveryReport:
        match remedy.action:
            case RunCommand():
                return await run_command(remedy.action, about, remedy.timeout_s)
            case RestartService():
                return await run_command(remedy.action.command(about["unit"]), about, remedy.timeout_s)
            case CallWebhook():
                return await caller(tls())(remedy.action, about, remedy.timeout_s)
        try:
            async with asyncio.timeout(remedy.timeout_s):
                report = await _ORCHESTRATED[type(remedy.action)](remedy.action, about)
        except TimeoutError:
            detail = f"not finished within {remedy.timeout_s:g} s; a part may have been done"
            return RecoveryReport(RecoveryResult.TIMEOUT, detail)
        return report

    return act


async def replace_tasks(action: ReplaceTasks, about: Incident) -> RecoveryReport:
    """Act on the unit that `about` is about. Its caller bounds how long it takes."""
    return await asyncio.to_thread(_run, action, about)


_ORCHESTRATED: Mapping[type, Callable[[Any, Incident], Awaitable[RecoveryReport]]] = {
    ReplacePods: replace_pods,
    SetImage: set_image,
    ReplaceTasks: replace_tasks,
}
"""What an orchestrator carries out."""


# Acts on a unit in Amazon ECS: its tasks are stopped, or their services are deployed again.
#
# The tasks of a unit are those with the tag `cellgate:unit`. A refused one spares no other: a unit is all of
# its tasks or nothing. boto3 blocks, so everything runs in one thread.


TASKS_MAX = 256
"""More tasks of one unit are a mistake."""
REASON_MAX = 255
"""The API's limit (StopTask)."""


def _run(action: ReplaceTasks, about: Incident) -> RecoveryReport:
    unit = about["unit"]
    try:
        client = connect(action.region)
        tasks = [
            task
            for task in running_tasks(client, action.cluster, action.services)
            if tags_of(task).get(UNIT_TAG) == unit
        ]
        if not 0 < len(tasks) <= TASKS_MAX:
            what = f"{len(tasks)} tasks with the tag {UNIT_TAG}={unit} in cluster {action.cluster}"
            raise AwsError(f"{what}, expected 1 to {TASKS_MAX}")
        if not action.deploy:
            reason = f"cellgate {about['id']}: {one_line(about['reason'])}"[:REASON_MAX]
            return _each("stopped", "tasks", tasks, lambda task: _stop(client, action, task, reason))
        services = services_of(tasks)
        return _each("deployed", "services", services, lambda service: _deploy(client, action, *service))
    except AwsError as error:
        return RecoveryReport(RecoveryResult.REFUSED, f"{error}; nothing was done")


def _stop(client: Any, action: ReplaceTasks, task: Task, reason: str) -> str:
    arn = str(task["taskArn"])
    with in_one_line():
        client.stop_task(cluster=action.cluster, task=arn, reason=reason)
    return arn


def _deploy(client: Any, action: ReplaceTasks, service: str, family: str) -> str:
    with in_one_line():
        client.update_service(
            cluster=action.cluster, service=service, taskDefinition=family, forceNewDeployment=True
        )
    return service


def _each(done: str, noun: str, things: Iterable[Any], act: Callable[[Any], str]) -> RecoveryReport:
    """Act on all; what is refused is reported."""
    well, refused, count = list[str](), list[str](), 0
    for thing in things:
        count += 1
        try:
            well.append(act(thing))
        except AwsError as error:
            refused.append(str(error))
    detail = "; ".join([f"{done} {len(well)} of {count} {noun}", *refused[:1]])
    output = "\n".join([*well, *refused])
    if not well:
        return RecoveryReport(RecoveryResult.REFUSED, detail, output)
    return RecoveryReport(RecoveryResult.FAILED if refused else RecoveryResult.OK, detail, output)


def services_of(tasks: Iterable[Task]) -> list[tuple[str, str]]:
    """The services of tasks, each with the family of its task definition; without a revision, a family means
    the newest one. Raises AwsError for a task that belongs to no service.
    """
    found = set[tuple[str, str]]()
    for task in tasks:
        kind, _, service = str(task.get("group", "")).partition(":")
        if kind != "service":
            raise AwsError(f"task {task['taskArn']} belongs to no service")
        found.add((service, str(task["taskDefinitionArn"]).rpartition("/")[2].rpartition(":")[0]))
    return sorted(found)


# Calls a webhook for a unit: one signed POST, limited in time and in the size of the answer.
#
# `X-Cellgate-Signature` is `sha256=` and the hex HMAC-SHA256, with the secret, over the value of
# `X-Cellgate-Timestamp` (seconds since 1970), a full stop, and the body.


ANSWER_KEPT = 4096
TIMESTAMP, SIGNATURE = "X-Cellgate-Timestamp", "X-Cellgate-Signature"


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature of a body that is sent at `timestamp`."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


WebhookCall = Callable[[CallWebhook, Incident, float], Awaitable[RecoveryReport]]
"""Calls a webhook, which may take so many seconds."""


def caller(tls: ssl.SSLContext, wall: Callable[[], float] = time.time) -> WebhookCall:
    """Calls webhooks, verified by `tls`."""

    async def call(action: CallWebhook, about: Incident, timeout_s: float) -> RecoveryReport:
        # Imported late, and in a thread: it takes 10 MB, which most gates do not need.
        aiohttp: Any = await asyncio.to_thread(import_module, "aiohttp")
        body, timestamp = orjson.dumps(about), str(int(wall()))
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: timestamp,
            SIGNATURE: sign(action.secret, timestamp, body),
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(action.url, data=body, headers=headers, ssl=tls, allow_redirects=False) as reply,
            ):
                text = (await reply.content.read(ANSWER_KEPT)).decode("utf-8", "replace")
                result = RecoveryResult.OK if 200 <= reply.status < 300 else RecoveryResult.FAILED
                return RecoveryReport(result, f"it answered {reply.status}", text)
        except TimeoutError:
            return RecoveryReport(RecoveryResult.TIMEOUT, f"no answer within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return RecoveryReport(
                RecoveryResult.FAILED, f"it could not be called: {error or type(error).__name__}"
            )

    return call


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
    incident_file = os.memfd_create("incident")
    try:
        with os.fdopen(os.dup(incident_file), "wb") as file:
            file.write(orjson.dumps(about))
        os.lseek(incident_file, 0, os.SEEK_SET)
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=incident_file,
            stdout=output,
            stderr=output,
            env=environment(about, os.environ),
            # A group of its own, to be killed as one.
            start_new_session=True,
        )
    finally:
        os.close(incident_file)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that sleeps in the kernel may not have ended yet; do not wait longer for it.
    with suppress(TimeoutError):
        async with asyncio.timeout(REAP_S):
            await process.wait()
