"""The last flips and operator actions with their reasons, and the followers of the live stream.

Every event has the same words in the log, in `/events` and in the live stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from cellgate.proxy.observe.log import Level, log_line, utc
from cellgate.proxy.observe.text import one_line
from cellgate.router.board import Flip
from cellgate.router.nouns import Strength, Verdict
from cellgate.router.unit_state import Lease

EventRecord = dict[str, Any]
"""One event, ready for JSON: `id`, `time`, `kind`, `line` (for people), and what its kind adds."""

KEPT = 256
FOLLOWER_BACKLOG = 64
FLIPS_A_MINUTE = 16
"""Of one unit; more are counted in the last event of the same kind."""
EVENT_LASTS_S = 60.0
"""What is said again so soon has lasted meanwhile."""

ActionKind = Literal[
    "drain",
    "undrain",
    "pause",
    "resume",
    "sleep",
    "wake",
    "hold",
    "hold_over",
    "reload",
    "reload_refused",
    "keys_refused",
    "keys_taken",
    "limits_alone",
    "limits_shared",
    "panic",
    "panic_over",
    "degraded",
    "recovered",
    "lag",
    "gate_fault",
    "broken_streams",
    "responses_lost",
    "discovered",
    "source_lost",
    "source_back",
    "clash",
    "kept",
    "kept_over",
    "capacity",
    "start_overdue",
    "recovery",
    "recovery_done",
    "recovery_failed",
    "recovery_held",
    "recovery_gave_up",
    "recovery_unrecorded",
    "acting",
    "alb_weight",
    "roll",
    "roll_failed",
    "handover",
    "handover_failed",
    "poison",
    "poison_lifted",
    "shared_fate",
    "drift",
    "drift_over",
    "stack_drift",
    "stack_drift_over",
    "ranks",
    "answers_differ",
    "answers_agree",
    "corrupted",
    "refuses",
    "model_claimed",
    "models_changed",
    "canary_refused",
    "kv_full",
    "kv_full_over",
    "impossible_usage",
    "forged",
    "link_lost",
    "link_back",
    "helper_lost",
    "helper_back",
    "helper_ages",
]


class EventLog:
    """Remembers the last events, logs them and passes them on. `wall` is the wall clock (seconds since 1970).

    `passes` is the number of canaries that bring a DOWN unit back (Rules.passes).
    """

    def __init__(
        self, wall: Callable[[], float], passes: int, log: Callable[[Level, str], None] = log_line
    ) -> None:
        self._wall = wall
        self._passes = passes
        self._log = log
        self._events: deque[EventRecord] = deque(maxlen=KEPT)
        self._followers: set[Follower] = set()
        self._count = 0
        self._lasting: dict[ActionKind, tuple[EventRecord, float]] = {}
        """The last event of each kind that may last, and when it was said last."""
        self._flips: dict[str, _UnitFlips] = {}

    def add(self, happened: Flip | Action, evicted: Sequence[Lease] = (), staying: int = 0) -> None:
        """Record a flip (with the leases that it evicted, and how many it left there) or an action."""
        if isinstance(happened, Flip):
            if not self._is_one_of_many(happened):
                said = _flip_event(happened, evicted, staying, self._passes)
                event = self._remember(said, _VERDICT_LEVELS.get(happened.after, "info"))
                self._flips[happened.unit].last[happened.after] = event
        elif not self._is_repeated(happened):
            row = _ACTION_ROWS[happened.kind]
            event = self._remember(_action_event(happened), row.level)
            if row.lasts:
                self._lasting[happened.kind] = (event, self._wall())

    def _remember(self, said: EventRecord, level: Level) -> EventRecord:
        self._count += 1
        event: EventRecord = {"id": self._count, "time": utc(self._wall())} | said
        self._log(level, event["line"])
        self._events.append(event)
        self._tell(event)
        return event

    def became(self, unit: str, how: str) -> None:
        """What became of a request of a unit that is out: counted in the event of that."""
        event = next(filter(partial(_took_out, unit), reversed(self._events)), None)
        if event is None:
            return
        known = event.setdefault("became", {})
        known[how] = known.get(how, 0) + 1
        said = ", ".join(f"{count} {what}" for what, count in known.items())
        event["line"] = f"{event['line'].partition(_BECAME)[0]}{_BECAME}{said}"
        if sum(known.values()) == event["leaving"] + event["streams"]:
            self._log("info", f"unit {unit} is out; its requests: {said}")

    def _is_repeated(self, again: Action) -> bool:
        """Whether it lasts since its last event, which is then counted there: one each time would push all
        others out of the list.
        """
        now, (event, at) = self._wall(), self._lasting.get(again.kind, ({"id": -KEPT}, 0.0))
        if event["id"] <= self._count - KEPT or now - at > EVENT_LASTS_S:
            return False
        fresh = _action_event(again)["line"]
        self._log(_ACTION_ROWS[again.kind].level, fresh)
        event["count"] = event.get("count", 1) + 1
        event["line"] = f"{fresh} ({event['count']} times, last at {utc(now)})"
        self._lasting[again.kind] = (event, now)
        self._tell(event)
        return True

    def _is_one_of_many(self, flip: Flip) -> bool:
        """Whether a unit changes so often that this is counted in its last change of the kind: what a unit
        says of its restarts must not push out what others have to tell.
        """
        now = self._wall()
        known = self._flips_of(flip.unit, now)
        known.count += 1
        event = known.last.get(flip.after)
        if known.count <= FLIPS_A_MINUTE or event is None or event["id"] <= self._count - KEPT:
            return False
        event["count"] = event.get("count", 1) + 1
        event["line"] = (
            f"{_flip_line(flip, '', 0)} ({event['count']} times, last at {utc(now)}: it changes too often)"
        )
        return True

    def _flips_of(self, unit: str, now: float) -> _UnitFlips:
        """Of its present minute. What is over is forgotten, oldest first."""
        while self._flips and now - next(iter(self._flips.values())).since > EVENT_LASTS_S:
            del self._flips[next(iter(self._flips))]
        return self._flips.setdefault(unit, _UnitFlips(now))

    def _tell(self, event: EventRecord) -> None:
        for follower in tuple(self._followers):
            follower.put(event)
            if follower.ended:
                self._followers.discard(follower)

    def last(self) -> list[EventRecord]:
        """The events remembered, oldest first."""
        return list(self._events)

    @property
    def followers(self) -> int:
        """The number of followers."""
        return len(self._followers)

    def subscribe(self) -> Follower:
        """Follow new events; must be ended with `unsubscribe`."""
        follower = Follower()
        self._followers.add(follower)
        return follower

    def unsubscribe(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def close(self) -> None:
        """End all live streams, because the gate stops."""
        for follower in self._followers:
            follower.end()
        self._followers.clear()


@dataclass(frozen=True, slots=True)
class Action:
    """An action of an operator or of the gate. `by` is its origin: an address, a signal, "gate".

    `cell` is set where it concerns all units of one.
    """

    kind: ActionKind
    by: str
    unit: str | None = None
    detail: str = ""
    cell: str | None = None


class _ActionRow(NamedTuple):
    """What is said of an action, and how loud; `lasts`: again and again for as long as it does."""

    line: str
    level: Level = "info"
    lasts: bool = False


_ACTION_ROWS: dict[ActionKind, _ActionRow] = {
    "drain": _ActionRow("{whom} drained by {by}: no new requests, running ones finish"),
    "undrain": _ActionRow("{whom} undrained by {by}"),
    "pause": _ActionRow("unit {unit} drained and paused by {by}"),
    "resume": _ActionRow("unit {unit} resumed and undrained by {by}"),
    "sleep": _ActionRow("unit {unit} drained and put to sleep by {by}"),
    "wake": _ActionRow("unit {unit} woken and undrained by {by}"),
    "hold": _ActionRow("unit {unit} is on hold"),
    "hold_over": _ActionRow("the hold of unit {unit} is over"),
    "reload": _ActionRow("configuration reloaded by {by}"),
    "reload_refused": _ActionRow("configuration not reloaded (by {by}), what was in use stays", "error"),
    "keys_refused": _ActionRow("the file of keys has a mistake, and the keys stay as they were", "error"),
    "keys_taken": _ActionRow("keys read again"),
    "limits_alone": _ActionRow("each gate counts its limits alone", "warning"),
    "limits_shared": _ActionRow("gates share their limits again"),
    "panic": _ActionRow("panic", "warning"),
    "panic_over": _ActionRow("panic is over"),
    "degraded": _ActionRow("unit {unit} is slow", "warning"),
    "recovered": _ActionRow("unit {unit} is no longer slow"),
    "lag": _ActionRow("the gate lags", "warning", lasts=True),
    "gate_fault": _ActionRow("the gate cannot open connections", "warning", lasts=True),
    "broken_streams": _ActionRow("streams that unit {unit} broke in the middle", "warning"),
    "responses_lost": _ActionRow("requests follow responses that only unit {unit} has", "warning"),
    "discovered": _ActionRow("units found"),
    "source_lost": _ActionRow("a source of units failed", "warning"),
    "source_back": _ActionRow("a source of units works again"),
    "clash": _ActionRow("two units have the same name", "warning"),
    "kept": _ActionRow("{units} not configured any more", "warning"),
    "kept_over": _ActionRow("{units} kept no longer"),
    "capacity": _ActionRow("the capacity of a model has changed"),
    "start_overdue": _ActionRow("unit {unit} is starting for longer than usual", "warning"),
    "recovery": _ActionRow("recovering unit {unit}", "warning"),
    "recovery_done": _ActionRow("recovery of unit {unit}"),
    "recovery_failed": _ActionRow("recovery of unit {unit} failed", "warning"),
    "recovery_held": _ActionRow("recovery waits", "warning"),
    "recovery_gave_up": _ActionRow("recovery of unit {unit} was given up", "error"),
    "recovery_unrecorded": _ActionRow(
        "the result of a recovery of unit {unit} is not in the audit log", "error"
    ),
    "acting": _ActionRow("this gate acts for {whom}"),
    "alb_weight": _ActionRow("the weight of this gate's target group at the load balancer"),
    "roll": _ActionRow("{rolled}"),
    "roll_failed": _ActionRow("{rolled}", "error"),
    "handover": _ActionRow("handed over"),
    "handover_failed": _ActionRow("no hand-over", "error"),
    "poison": _ActionRow("a prompt ends units", "error"),
    "poison_lifted": _ActionRow("a prompt is no longer refused, by {by}"),
    "shared_fate": _ActionRow("units fail together", "error"),
    "drift": _ActionRow("units of {whom} run different builds", "warning"),
    "drift_over": _ActionRow("units of {whom} run the same build again"),
    "stack_drift": _ActionRow("{whom}: software differs", "warning"),
    "stack_drift_over": _ActionRow("{whom}: the software is the same again"),
    "ranks": _ActionRow("what ranks of unit {unit} say", "warning"),
    "answers_differ": _ActionRow("answers of unit {unit} differ", "error"),
    "answers_agree": _ActionRow("answers of unit {unit} no longer differ"),
    "corrupted": _ActionRow("unit {unit} has corrupted requests (NaN)", "warning"),
    "refuses": _ActionRow("unit {unit}", "warning"),
    "model_claimed": _ActionRow("a unit claims a model of others", "warning"),
    "models_changed": _ActionRow("the models of a unit have changed while it runs"),
    "canary_refused": _ActionRow("unit {unit} refuses canaries", "error"),
    "kv_full": _ActionRow("the KV cache of an engine is full", "warning"),
    "kv_full_over": _ActionRow("the KV cache of an engine has room again"),
    "impossible_usage": _ActionRow("unit {unit} told more tokens than an answer can have", "warning"),
    "forged": _ActionRow("not believed in Redis, about {forged}", "error"),
    "link_lost": _ActionRow("transfers of KV blocks fail", "warning"),
    "link_back": _ActionRow("KV blocks arrive again"),
    "helper_lost": _ActionRow("a helper of the gate fails", "error"),
    "helper_back": _ActionRow("a helper of the gate works again"),
    "helper_ages": _ActionRow("a certificate ends soon", "warning"),
}
_VERDICT_LEVELS: dict[Verdict, Level] = {Verdict.SUSPECT: "warning", Verdict.DOWN: "warning"}


@dataclass(slots=True)
class _UnitFlips:
    """How often a unit has changed since a time, and its last event of each verdict."""

    since: float
    count: int = 0
    last: dict[Verdict, EventRecord] = field(default_factory=dict)


class Follower:
    """One reader of the live stream: an async iterator of events that ends when the gate does.

    A follower that is too slow gets what was queued for it, an event of kind `cut`, and the end.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EventRecord | None] = asyncio.Queue()
        self.ended = False

    def put(self, event: EventRecord) -> None:
        """Queue an event, or end the stream when too many are waiting."""
        if self._queue.qsize() < FOLLOWER_BACKLOG:
            self._queue.put_nowait(event)
            return
        line = f"cut: {FOLLOWER_BACKLOG} events were waiting to be read; GET /events has the last {KEPT}"
        self._queue.put_nowait({"id": event["id"], "time": event["time"], "kind": "cut", "line": line})
        self.end()

    def end(self) -> None:
        self.ended = True
        self._queue.put_nowait(None)

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> EventRecord:
        event = await self._queue.get()
        if event is None:
            raise StopAsyncIteration
        return event


_BECAME = "; its requests since: "


def _took_out(unit: str, event: EventRecord) -> bool:
    """Whether this event has evicted requests of the unit."""
    return event.get("unit") == unit and event.get("after") in (Verdict.DOWN.value, Verdict.STARTING.value)


def _flip_event(flip: Flip, evicted: Sequence[Lease], staying: int, passes: int) -> EventRecord:
    streams = sum(lease.committed for lease in evicted)
    leaving = len(evicted) - streams
    why = flip.evidence
    return {
        "kind": "flip",
        "unit": flip.unit,
        "cell": flip.cell,
        "node": why.node,
        "before": flip.before.value,
        "after": flip.after.value,
        "source": why.source,
        "strength": why.strength.name.lower(),
        "reason": why.reason,
        "leaving": leaving,
        "staying": staying,
        "streams": streams,
        "line": _flip_line(flip, _requests(leaving, staying, streams), passes),
    }


def _requests(leaving: int, staying: int, streams: int) -> str:
    """What becomes of the requests of a unit that is out, as far as it is known then."""
    parts = []
    if leaving:
        parts.append(f"{_count(leaving, 'request')} look{'s' if leaving == 1 else ''} for another unit")
    if staying:
        parts.append(
            f"{_count(staying, 'request')} stay{'s' if staying == 1 else ''} until another unit does better"
        )
    if streams:
        goes = "goes" if streams == 1 else "go"
        parts.append(f"{_count(streams, 'stream')} {goes} on, or {goes} over to another unit")
    return ", ".join(parts)


def _flip_line(flip: Flip, requests: str, passes: int) -> str:
    source = flip.evidence.source + (f", node {flip.evidence.node}" if flip.evidence.node else "")
    parts = [
        f"unit {flip.unit} (cell {flip.cell}) {flip.before.value} -> {flip.after.value}: "
        f"{flip.evidence.reason} (source {source})"
    ]
    # What had broken before, as where a process ends, is in the event of its broken streams.
    if requests:
        parts.append(requests)
    node = flip.evidence.node
    if flip.after is Verdict.DOWN and node is not None and flip.evidence.strength is Strength.FATAL:
        parts.append(f"it returns once node {node} is healthy again and {_canaries(passes)}")
    else:
        parts.append(_prospect(flip.after, passes))
    return one_line("; ".join(parts))


def _prospect(after: Verdict, passes: int) -> str:
    """What happens next to the unit."""
    canaries = _canaries(passes)
    return {
        Verdict.STARTING: "it gets requests once a canary passes",
        Verdict.UP: "it gets requests",
        Verdict.SUSPECT: "a canary is sent now; until it passes, other units are preferred",
        Verdict.DOWN: f"it returns after {canaries}",
        Verdict.PROBATION: f"it gets requests once {canaries} in a row",
    }[after]


def _action_event(action: Action) -> EventRecord:
    whom = f"cell {action.cell}" if action.cell is not None else f"unit {action.unit}"
    line = _ACTION_ROWS[action.kind].line.format(
        by=action.by,
        unit=action.unit,
        whom=whom,
        units="units are" if action.unit is None else f"unit {action.unit} is",
        rolled="rolling" if action.unit is None else f"unit {action.unit}",
        forged="rolls" if action.cell is None else whom,
    )
    line += f": {action.detail}" if action.detail else ""
    event = {"kind": action.kind, "unit": action.unit, "by": action.by, "line": line}
    return event if action.cell is None else event | {"cell": action.cell}


def _canaries(passes: int) -> str:
    return "1 canary passes" if passes == 1 else f"{passes} canaries pass"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
