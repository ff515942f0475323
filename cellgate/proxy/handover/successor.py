"""The gate's side: starts a successor, passes everything on, and ends only once that one is ready.

Any failure before that ends the successor, and the gate continues unchanged.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cellgate.proxy.handover.channel import HELLO, READY, VARIABLE, frame_document, send
from cellgate.proxy.handover.open_listeners import Listeners


class HandoverError(Exception):
    """There is no successor. `str()` says why, for the operator."""


async def hand_over(
    listeners: Listeners, tell: Callable[[], Any], tell_last: Callable[[], Any], limit_s: float
) -> int:
    """Have a successor take over; its process id. Raises HandoverError.

    `tell` gives the first document for it, `tell_last` the one after it accepts clients.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        with theirs:
            process = _start(theirs)
        try:
            async with asyncio.timeout(limit_s):
                await _hear(ours, HELLO)
                names = {name: len(sockets) for name, sockets in listeners.items()}
                every = [each for sockets in listeners.values() for each in sockets]
                await send(ours, {"listeners": names, "known": tell()}, every)
                await _hear(ours, READY)
        except asyncio.CancelledError:
            await asyncio.to_thread(_end, process)
            raise
        except Exception as error:
            code = await asyncio.to_thread(_end, process)
            raise HandoverError(_why(error, code, limit_s)) from error
        # It accepts clients: from here on there is no way back, and cancellation is impossible.
        with suppress(OSError):
            ours.sendall(frame_document(tell_last()))
    return process.pid


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the same command again, with new code and configuration if there is any."""
    try:
        return subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, VARIABLE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
    except OSError as error:
        raise HandoverError(f"it could not be started: {error}") from None


async def _hear(ours: socket.socket, word: bytes) -> None:
    heard = await asyncio.get_running_loop().sock_recv(ours, len(word))
    if heard != word:
        raise ConnectionError(f"it answered {heard!r} instead of {word!r}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill a failed successor; returns its exit code, if it had ended by itself."""
    with suppress(subprocess.TimeoutExpired):
        # It has closed its end, probably because it is ending.
        return process.wait(0.5)
    process.kill()
    process.wait()
    return None


def _why(error: Exception, code: int | None, limit_s: float) -> str:
    if code is not None:
        return f"it ended with {code} before it was ready; its output is in the log above"
    if isinstance(error, TimeoutError):
        return f"it was not ready within {limit_s:g} s and was killed"
    return f"it was killed, because its sockets could not be passed to it: {error!r}"
