"""The audit log: a line of JSON for each step of recovery, written to disk before recovery continues.

Written by a separate thread, since a disk may be slow; a daemon thread, so that a blocked disk does not keep
the gate from ending.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

WRITE_S = 10.0
"""A write that takes longer counts as failed."""


async def record(path: str, entry: Mapping[str, Any]) -> None:
    """Append `entry` to the log at `path`. Raises OSError when it is not on the disk in time."""
    loop = asyncio.get_running_loop()
    written: asyncio.Future[None] = loop.create_future()
    line = orjson.dumps(entry) + b"\n"
    threading.Thread(target=_write, args=(loop, written, path, line), name="audit", daemon=True).start()
    try:
        async with asyncio.timeout(WRITE_S):
            await written
    except TimeoutError:
        raise OSError(None, f"not written within {WRITE_S:g} s", path) from None


def _write(loop: asyncio.AbstractEventLoop, written: asyncio.Future[None], path: str, line: bytes) -> None:
    error: OSError | None = None
    try:
        append(path, line)
    except OSError as failed:
        error = failed

    def tell() -> None:
        if written.done():
            return
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)

    # The loop may have ended meanwhile.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def append(path: str, line: bytes) -> None:
    """Append and flush one line, whole. Raises OSError."""
    is_new = not Path(path).exists()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        # In one call, so that lines of several gates do not mix.
        if os.write(fd, line) < len(line):
            raise OSError(None, "the disk took only a part of a line", path)
        os.fsync(fd)
    finally:
        os.close(fd)
    if is_new:
        _sync_folder(Path(path).parent)


def _sync_folder(folder: Path) -> None:
    """A new file is durable only once its directory entry is."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
