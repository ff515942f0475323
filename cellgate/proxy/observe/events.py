"""The last flips and operator actions with their reasons, and the followers of the live stream.

Every event has the same words in the log, in `/events` and in the live stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

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
_LEVELS: dict[Verdict | ActionKind, Level] = {
    Verdict.SUSPECT: "warning",
    Verdict.DOWN: "warning",
    "panic": "warning",
    "degraded": "warning",
    "lag": "warning",
    "gate_fault": "warning",
    "broken_streams": "warning",
    "responses_lost": "warning",
    "source_lost": "warning",
    "clash": "warning",
    "kept": "warning",
    "start_overdue": "warning",
    "recovery": "warning",
    "recovery_failed": "warning",
    "recovery_held": "warning",
    "recovery_gave_up": "error",
    "recovery_unrecorded": "error",
    "roll_failed": "error",
    "handover_failed": "error",
    "reload_refused": "error",
    "keys_refused": "error",
    "limits_alone": "warning",
    "poison": "error",
    "shared_fate": "error",
    "drift": "warning",
    "stack_drift": "warning",
    "ranks": "warning",
    "answers_differ": "error",
    "corrupted": "warning",
    "refuses": "warning",
    "model_claimed": "warning",
    "canary_refused": "error",
    "kv_full": "warning",
    "impossible_usage": "warning",
    "forged": "error",
    "link_lost": "warning",
    "helper_lost": "error",
    "helper_ages": "warning",
}
_LASTING: frozenset[ActionKind] = frozenset({"gate_fault", "lag"})
"""Said again and again for as long as they last."""
_EVENT_LINES: dict[ActionKind, str] = {
    "keys_refused": "the file of keys has a mistake, and the keys stay as they were",
    "keys_taken": "keys read again",
    "limits_alone": "each gate counts its limits alone",
    "limits_shared": "gates share their limits again",
    "kv_full": "the KV cache of an engine is full",
    "kv_full_over": "the KV cache of an engine has room again",
    "panic": "panic",
    "panic_over": "panic is over",
    "lag": "the gate lags",
    "gate_fault": "the gate cannot open connections",
    "handover": "handed over",
    "handover_failed": "no hand-over",
    "recovery_held": "recovery waits",
    "discovered": "units found",
    "source_lost": "a source of units failed",
    "source_back": "a source of units works again",
    "clash": "two units have the same name",
    "capacity": "the capacity of a model has changed",
    "poison": "a prompt ends units",
    "model_claimed": "a unit claims a model of others",
    "models_changed": "the models of a unit have changed while it runs",
    "shared_fate": "units fail together",
    "alb_weight": "the weight of this gate's target group at the load balancer",
    "link_lost": "transfers of KV blocks fail",
    "link_back": "KV blocks arrive again",
    "helper_lost": "a helper of the gate fails",
    "helper_back": "a helper of the gate works again",
    "helper_ages": "a certificate ends soon",
}
"""What is said of an action that concerns no unit, cell or person."""


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
        if isinstance(happened, Action) and happened.kind in _LASTING and self._is_repeated(happened):
            return
        if isinstance(happened, Flip) and self._is_one_of_many(happened):
            return
        self._count += 1
        head: EventRecord = {"id": self._count, "time": utc(self._wall())}
        if isinstance(happened, Flip):
            event = head | _flip_event(happened, evicted, staying, self._passes)
            self._flips[happened.unit].last[happened.after] = event
            self._log(_LEVELS.get(happened.after, "info"), event["line"])
        else:
            event = head | _action_event(happened)
            self._log(_LEVELS.get(happened.kind, "info"), event["line"])
            if happened.kind in _LASTING:
                self._lasting[happened.kind] = (event, self._wall())
        self._events.append(event)
        self._tell(event)

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
        event, at = self._lasting.get(again.kind, ({"id": -KEPT}, 0.0))
        now, fresh = self._wall(), _action_event(again)["line"]
        if event["id"] <= self._count - KEPT or now - at > EVENT_LASTS_S:
            return False
        self._log(_LEVELS.get(again.kind, "info"), fresh)
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
    units = "units are" if action.unit is None else f"unit {action.unit} is"
    line = (
        _EVENT_LINES.get(action.kind)
        or {
            "drain": f"{whom} drained by {action.by}: no new requests, running ones finish",
            "undrain": f"{whom} undrained by {action.by}",
            "pause": f"unit {action.unit} drained and paused by {action.by}",
            "resume": f"unit {action.unit} resumed and undrained by {action.by}",
            "sleep": f"unit {action.unit} drained and put to sleep by {action.by}",
            "wake": f"unit {action.unit} woken and undrained by {action.by}",
            "kept": f"{units} not configured any more",
            "kept_over": f"{units} kept no longer",
            "start_overdue": f"unit {action.unit} is starting for longer than usual",
            "hold": f"unit {action.unit} is on hold",
            "hold_over": f"the hold of unit {action.unit} is over",
            "reload": f"configuration reloaded by {action.by}",
            "reload_refused": f"configuration not reloaded (by {action.by}), what was in use stays",
            "degraded": f"unit {action.unit} is slow",
            "recovered": f"unit {action.unit} is no longer slow",
            "broken_streams": f"streams that unit {action.unit} broke in the middle",
            "responses_lost": f"requests follow responses that only unit {action.unit} has",
            "recovery": f"recovering unit {action.unit}",
            "recovery_done": f"recovery of unit {action.unit}",
            "recovery_failed": f"recovery of unit {action.unit} failed",
            "recovery_gave_up": f"recovery of unit {action.unit} was given up",
            "recovery_unrecorded": f"the result of a recovery of unit {action.unit} is not in the audit log",
            "acting": f"this gate acts for {whom}",
            "roll": "rolling" if action.unit is None else f"unit {action.unit}",
            "roll_failed": "rolling" if action.unit is None else f"unit {action.unit}",
            "drift": f"units of {whom} run different builds",
            "drift_over": f"units of {whom} run the same build again",
            "stack_drift": f"{whom}: software differs",
            "ranks": f"what ranks of unit {action.unit} say",
            "stack_drift_over": f"{whom}: the software is the same again",
            "answers_differ": f"answers of unit {action.unit} differ",
            "answers_agree": f"answers of unit {action.unit} no longer differ",
            "impossible_usage": f"unit {action.unit} told more tokens than an answer can have",
            "forged": f"not believed in Redis, about {'rolls' if action.cell is None else whom}",
            "corrupted": f"unit {action.unit} has corrupted requests (NaN)",
            "refuses": f"unit {action.unit}",
            "canary_refused": f"unit {action.unit} refuses canaries",
            "poison_lifted": f"a prompt is no longer refused, by {action.by}",
        }[action.kind]
    )
    line += f": {action.detail}" if action.detail else ""
    event = {"kind": action.kind, "unit": action.unit, "by": action.by, "line": line}
    return event if action.cell is None else event | {"cell": action.cell}


def _canaries(passes: int) -> str:
    return "1 canary passes" if passes == 1 else f"{passes} canaries pass"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
