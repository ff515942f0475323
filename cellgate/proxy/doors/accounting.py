"""Keys and limits of a control plane: the file of keys, the ledger, the usage log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.keys import KeyRing
from cellgate.proxy.doors.bill import Bill
from cellgate.proxy.doors.key_door import KeyDoor, TokenVerifier
from cellgate.proxy.doors.key_follower import KeyFollower
from cellgate.proxy.doors.ledger import LimitLedger
from cellgate.proxy.doors.metrics import DoorCounts
from cellgate.proxy.doors.usage_log import UsageRow, usage_log
from cellgate.proxy.logs.events import Action, EventLog
from cellgate.proxy.logs.log import log_line

if TYPE_CHECKING:
    from cellgate.proxy.config.settings import KeySettings, Settings
    from cellgate.proxy.doors.bill import Accounts
    from cellgate.proxy.logs.line_log import LineLog


class LimitSharing(Protocol):
    """Who shares limits with other gates."""

    def start(self) -> None: ...
    async def close(self) -> None: ...


class Accounting:
    """All of it, for one gate. `models` gives those of the configuration; `log` is the path of the usage
    log.
    """

    def __init__(
        self,
        keys: KeySettings,
        log: str | None,
        events: EventLog,
        models: Callable[[], frozenset[str]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.counts = DoorCounts(models)
        self.ledger = LimitLedger(wall, self.counts, self._record if log is not None else None)
        self.door: KeyDoor | None = None
        """That of the same process, if it has clients."""
        self._events = events
        self._usage: LineLog[UsageRow] | None = usage_log(log, wall) if log is not None else None
        if self._usage is not None:
            usage = self._usage
            self.counts.lines_lost = lambda: usage.dropped
        self._sharing: LimitSharing | None = None
        self._follower = KeyFollower(keys.file, self._take, self._refused)
        self._path = keys.file
        self._has_keys = False

    def begin(self) -> None:
        """Read the keys, and follow their file."""
        self._follower.read()
        self._follower.start()
        if self.door is not None:
            self.door.start()

    def share(self, sharing: LimitSharing) -> None:
        """Share the limits with other gates, from now on."""
        self._sharing = sharing
        sharing.start()

    def tick(self, now: float) -> None:
        """A few times a second."""
        if self.door is not None:
            self.door.tick(now)
        if self._usage is not None:
            self._usage.flush()

    async def close(self) -> None:
        """End; what was used is on the disk."""
        await self._follower.close()
        if self._sharing is not None:
            await self._sharing.close()
        if self.door is not None:
            await self.door.close()
        if self._usage is not None:
            self._usage.close()

    def _take(self, ring: KeyRing) -> None:
        self.ledger.take(ring)
        if self.door is not None:
            self.door.take(ring)
        self.counts.keys, self.counts.is_stale = len(ring.keys), False
        if self._has_keys:
            detail = f"{self._path}: {len(ring.keys)} keys, {len(ring.tenants)} tenants"
            self._events.add(Action("keys_taken", self._path, detail=detail))
        self._has_keys = True

    def _refused(self, problems: tuple[str, ...]) -> None:
        self.counts.reads_refused += 1
        self.counts.is_stale = True
        for problem in problems:
            self._events.add(Action("keys_refused", self._path, detail=problem))

    def _record(self, bill: Bill, cost: float) -> None:
        if self._usage is not None:
            self._usage.write(UsageRow(bill, cost))


def make_door(settings: Settings, accounts: Accounts, wall: Callable[[], float] = time.time) -> KeyDoor:
    """The door of a process that has clients. It has no keys yet."""
    keys = settings.keys
    assert keys is not None
    tokens: TokenVerifier | None = None
    if keys.jwt is not None:
        try:
            from cellgate.proxy.doors.web_tokens import (
                WebTokens,  # Late, because it is an extra, and takes its time.
            )

            tokens = WebTokens(keys.jwt, settings.tls.ca)
        except ModuleNotFoundError as error:
            why = f"{error.name} is not installed: pip install 'cellgate[jwt]'"
            log_line("error", f"JSON Web Tokens do not count, though they are configured: {why}")
    return KeyDoor(accounts, wall, ends_streams=keys.on_revoke == "end", tokens=tokens)
