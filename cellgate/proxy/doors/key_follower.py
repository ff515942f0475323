"""Follows the file of keys: what it says holds within a second. A file with a mistake changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from cellgate.proxy.config.key_file import KeyFileError, read_keys
from cellgate.proxy.config.keys import KeyRing
from cellgate.proxy.logs.defects import report_defect
from cellgate.proxy.process.watched_files import Signature, signature

LOOK_S = 0.4
"""How often the file is looked at: revocation takes at most a second."""


class KeyFollower:
    """Follows the file at `path`. `take` gets its keys, `refused` a line for each of its mistakes."""

    def __init__(
        self, path: str, take: Callable[[KeyRing], None], refused: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._path = path
        self._take = take
        self._refused = refused
        self._mark: Signature = None
        self._task: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Read it now, in this thread: at start nobody waits."""
        self._mark = signature(self._path)
        try:
            self._take(read_keys(self._path))
        except KeyFileError as error:
            self._refused(error.problems)

    def start(self) -> None:
        """Follow it until `close`."""
        self._task = asyncio.create_task(self._follow(), name="keys")

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            # In another thread, because the file may be on a network.
            mark = await asyncio.to_thread(signature, self._path)
            if mark == self._mark:
                continue
            self._mark = mark
            try:
                self._take(await asyncio.to_thread(read_keys, self._path))
            except KeyFileError as error:
                self._refused(error.problems)
            except Exception as error:  # The file must be followed, whatever comes.
                report_defect(asyncio.get_running_loop(), "the keys of clients", error)
