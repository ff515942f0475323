"""Accounting of a control plane: the file of keys, the ledger, the usage log.

In this order: `Accounting`, `SyncedFile`, `UsageTotal`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from cellgate.extras import part_of
from cellgate.probes.engines import object_of
from cellgate.proxy.admission.keys import KeyChecker, KeyFollower
from cellgate.proxy.admission.limits import KeyCounts, LimitLedger, UsageRecord
from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.key_file import KeyRing
from cellgate.proxy.observe.access_log import LineLog
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.helpers import HelperTrouble
from cellgate.proxy.observe.log import log_line, utc

if TYPE_CHECKING:
    from cellgate.proxy.admission.limits import Accounts
    from cellgate.proxy.config.settings import KeySettings, Settings


class Accounting:
    """All of it, for one gate. `models` gives those configured; `log` is the path of the usage log."""

    def __init__(
        self,
        keys: KeySettings,
        log: str | None,
        events: EventLog,
        models: Callable[[], frozenset[str]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.counts = KeyCounts(models)
        self.ledger = LimitLedger(wall, self.counts, self._record if log is not None else None)
        self.key_check: KeyChecker | None = None
        """That of the same process, if it has clients."""
        self._events = events
        self._usage: LineLog[UsageRow] | None = usage_log(log, wall) if log is not None else None
        if self._usage is not None:
            usage = self._usage
            self.counts.lines_lost = lambda: usage.dropped
        self.end_sharing: Callable[[], Awaitable[None]] | None = None
        """Limits are shared with other gates until this is called; None: they are not."""
        self._follower = KeyFollower(keys.file, self._take, self._refused)
        self._path = keys.file
        self._has_keys = False
        self._problems: tuple[str, ...] = ()

    def troubles(self) -> Mapping[str, HelperTrouble | None]:
        """Whether the file of keys was taken when it last changed."""
        if not self._problems:
            return {"keys": None}
        more = f" and {len(self._problems) - 1} more" if len(self._problems) > 1 else ""
        said = f"the file of keys has a mistake, and the keys stay as they were: {self._problems[0]}{more}"
        return {"keys": HelperTrouble(said, has_event=True)}

    def begin(self) -> None:
        """Read the keys, and follow their file."""
        self._follower.read()
        self._follower.start()
        if self.key_check is not None:
            self.key_check.start()

    def tick(self, now: float) -> None:
        """A few times a second."""
        self.ledger.tick()
        if self.key_check is not None:
            self.key_check.tick(now)
        if self._usage is not None:
            self._usage.flush()

    async def close(self) -> None:
        """End; what was used is on the disk."""
        await self._follower.close()
        if self.end_sharing is not None:
            await self.end_sharing()
        if self.key_check is not None:
            await self.key_check.close()
        if self._usage is not None:
            self._usage.close()

    def _take(self, ring: KeyRing) -> None:
        self.ledger.take(ring)
        if self.key_check is not None:
            self.key_check.take(ring)
        self.counts.is_stale, self._problems = False, ()
        if self._has_keys:
            detail = f"{self._path}: {len(ring.keys)} keys, {len(ring.tenants)} tenants"
            self._events.add(Action("keys_taken", self._path, detail=detail))
        self._has_keys = True

    def _refused(self, problems: tuple[str, ...]) -> None:
        self.counts.is_stale, self._problems = True, problems
        for problem in problems:
            self._events.add(Action("keys_refused", self._path, detail=problem))

    def _record(self, usage_record: UsageRecord, cost: float) -> None:
        if self._usage is not None:
            self._usage.write(UsageRow(usage_record, cost))


def make_key_check(
    settings: Settings, accounts: Accounts, wall: Callable[[], float] = time.time
) -> KeyChecker:
    """The check of keys of a process that has clients. It has no keys yet."""
    keys = settings.keys
    assert keys is not None
    tokens = None
    if keys.jwt is not None:
        try:
            tokens = part_of("web_tokens", "tokens").WebTokens(keys.jwt, settings.tls.ca)
        except ModuleNotFoundError as error:
            why = f"{error.name} is not installed: {how_to_install('jwt')}"
            log_line("error", f"JSON Web Tokens do not count, though they are configured: {why}")
    return KeyChecker(accounts, wall, ends_streams=keys.on_revoke == "end", tokens=tokens)


# The usage log: one line of JSON for each request that was charged, for billing.
#
# A batch of lines is on the disk (fsync) before the next one is written. A line that a crash has cut off is
# ended, so that the next one is whole; who reads the file skips it. A file that was renamed (logrotate) is
# left for a new one.


TEXT_MAX = 256
"""The most characters of a text that a client or an engine chose."""
USAGE_COLUMNS = (
    "time",
    "request_id",
    "key",
    "tenant",
    "model",
    "route",
    "status",
    "prompt_tokens",
    "completion_tokens",
    "is_estimated",
    "cost",
)


class UsageRow(NamedTuple):
    """One request as it is logged: its bill, and its cost in the currency of the prices."""

    usage_record: UsageRecord
    cost: float


def usage_log(path: str, wall: Callable[[], float]) -> LineLog[UsageRow]:
    """The log at `path`, which is appended to."""
    return LineLog(usage_line, SyncedFile(path), wall, "usage log")


def usage_line(at: float, row: UsageRow) -> bytes:
    """One line; docs/limits.md has the fields."""
    usage_record = row.usage_record
    values = (
        utc(at),
        usage_record.request_id,
        usage_record.key,
        usage_record.tenant,
        usage_record.model[:TEXT_MAX],
        usage_record.route,
        usage_record.status,
        usage_record.prompt_tokens,
        usage_record.completion_tokens,
        usage_record.is_estimated,
        row.cost,
    )
    return orjson.dumps(dict(zip(USAGE_COLUMNS, values, strict=True))) + b"\n"


class SyncedFile:
    """A file to append to; what was written is on the disk. Raises OSError, and opens it again after that."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._inode = 0

    def write(self, data: memoryview, /) -> int | None:
        """Write the beginning of `data`; how many bytes of it."""
        if self._fd < 0 or not self._is_current():
            self._open()
        try:
            written = os.write(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            self._close()
            raise
        return written

    def _is_current(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._close()
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        found = os.fstat(self._fd)
        self._inode = found.st_ino
        if found.st_size and os.pread(self._fd, 1, found.st_size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def rows_of(path: str) -> Iterator[dict[str, object]]:
    """The lines of a usage log, but for those that are none. Raises OSError."""
    with Path(path).open("rb") as file:
        for line in file:
            found = object_of(line)
            if found is not None and all(name in found for name in USAGE_COLUMNS):
                yield found


@dataclass(slots=True)
class UsageTotal:
    """What the requests of one key, tenant or model have used; of `estimated` ones the engine did not say."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: int = 0
    cost: float = 0.0


def totals(rows: Iterable[Mapping[str, Any]], by: str, since: str, until: str) -> dict[str, UsageTotal]:
    """The totals by a field of the lines, from `since` on and before `until` (times as in the log)."""
    found: dict[str, UsageTotal] = {}
    for row in rows:
        if not since <= row["time"] < until:
            continue
        total = found.setdefault(str(row[by]), UsageTotal())
        total.requests += 1
        total.prompt_tokens += row["prompt_tokens"]
        total.completion_tokens += row["completion_tokens"]
        total.estimated += bool(row["is_estimated"])
        total.cost += row["cost"]
    return dict(sorted(found.items()))
