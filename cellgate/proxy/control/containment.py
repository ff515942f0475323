"""Containment of poison: keeps a request that ends units away from them. router/poison.py judges.

This module acts on that: where the request goes next, which requests wait until a suspected prompt is proven
or cleared, which prompts are refused, and what operators learn. It is between a selection and the router,
only while there is something to contain (`watchful`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Protocol

from prometheus_client import Metric

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.families import counter, gauge, one_counter
from cellgate.router.board import Board, Flip
from cellgate.router.judge import works_though_out
from cellgate.router.nouns import Ask, Outcome, Refusal, Verdict
from cellgate.router.pick import OnResult
from cellgate.router.poison import (
    MEMORY_S,
    SIBLING_S,
    SPACE_S,
    Ban,
    Bans,
    Ledger,
    Loss,
    PoisonRecord,
    PromptVerdict,
)
from cellgate.router.queue import MOVED_S
from cellgate.router.unit_state import Lease, UnitState

BANS_A_MINUTE = 5
"""If more prompts than this end units within a minute, the units are at fault: no more prompts are
refused.
"""
GIVEN_UP_MOST = 2
"""A request is not sent to a further unit after so many of those it tried were given up while they had its
prompt, because of a time-out of ours. The prompt is not poison for that: it may only be more than these units
can do."""
OUTLIVED_LOOK_S, OUTLIVED_LOOKS = 0.5, 64
"""How often requests of suspected prompts are looked for, and at how many of each unit: the oldest."""
CONTAINED_LOOKS = 64
"""Held requests that are checked in one turn of the loop."""
_CONTAINED_LOST = frozenset(
    {FailureKind.CLOSED_EARLY, FailureKind.TRUNCATED, FailureKind.EVICTED, FailureKind.CUT}
)
_SILENT = frozenset({FailureKind.EVICTED, FailureKind.CUT})
"""Of these, the unit did nothing: it was given up."""
STILL_S = 1.0
"""A unit with work that has shown nothing for so long before a request came stood still already."""
_CONTAINED_BROKE = frozenset({FailureKind.CLOSED_EARLY, FailureKind.TRUNCATED})
"""Of these, only its connection broke off, which a proxy or a single worker may do: as with the next ones."""
_CONTAINED_REPORTED = frozenset(
    {FailureKind.UNIT_ERROR, FailureKind.FIRST_EVENT_ERROR, FailureKind.STREAM_ERROR}
)
"""Errors that may be the last ones of a dying engine: they count as a death if the unit is lost soon."""


class Containment:
    """The containment of one gate. `pick` is `Router.pick`, `soon` schedules a callback, `answered` gives the
    number of requests that a unit has answered.

    `counts` are for metrics; `on_ban` is called with each new ban of this gate, and with each that is lifted.
    """

    def __init__(
        self,
        board: Board,
        pick: Pick,
        events: EventLog,
        now: Callable[[], float],
        soon: Callable[[Callable[[], None]], object],
        *,
        answered: Callable[[str], int],
        ban_s: float,
    ) -> None:
        self.ledger = Ledger(LIMITS.poison_records, partial(reached, "poison_records"))
        self.bans = Bans(LIMITS.poison_bans, partial(reached, "poison_bans"))
        self.ban_s = ban_s
        self.watchful = False
        """Whether there is anything to contain."""
        self.counts = {"deaths": 0, "ended": 0, "refused": 0, "bans": 0}
        self.on_ban: Callable[[Ban, bool], None] = lambda _ban, _lifted: None
        self._board = board
        self._pick = pick
        self._events = events
        self._now = now
        self._soon = soon
        self._answered = answered
        self._answered_before: dict[str, int] = {}
        """How many requests a unit had answered when it last came up."""
        self._banned_at: deque[float] = deque(maxlen=BANS_A_MINUTE)
        self._reported: set[int] = set()
        self._given_up: dict[int, tuple[frozenset[str], float]] = {}
        """By fingerprint: which units were given up by a time-out of ours while they had it, and when."""
        self._held: dict[HeldRequest, None] = {}
        self._serving = False
        self._looked_at = 0.0
        self._lives: dict[tuple[str, int], tuple[float, tuple[float, float]]] = {}
        """By unit and fingerprint: its longest lives there, as seen at this time."""
        self._runs: dict[Lease, float] = {}
        """Since when requests of suspected prompts are computed, as far as known; inf: they wait there."""

    # -- what units do -------------------------------------------------------------------------------------

    def broke(self, lease: Lease, kind: FailureKind, tokens: int, shown: int) -> None:
        """An attempt has failed. `tokens`: shown to its client in all; `shown`: of these by this unit."""
        state, ask, now = lease.unit_state, lease.ask, self._now()
        # A drained or removed unit is stopped by its operator, one on hold stands still on purpose, one that
        # is out for its answers works, and a single forgotten stream is not a death.
        if (
            state.drained
            or state.hold is not None
            or state.retired
            or not ask.fingerprint
            or (kind is FailureKind.CUT and not lease.evicted)
            or (kind in _SILENT and (_stood_still(lease) or works_though_out(state.case)))
        ):
            return
        if lease.evicted and state.fell_unseen:
            if len(self._given_up) < LIMITS.poison_records:
                self._given_up[ask.fingerprint] = self._given_up_under(ask) | {state.unit.name}, now
                self.watchful = True
            return
        if kind not in _CONTAINED_LOST and kind not in _CONTAINED_REPORTED:
            return
        is_out = state.case.verdict in (Verdict.DOWN, Verdict.STARTING)
        is_loss = kind in _CONTAINED_LOST and (is_out or kind not in _CONTAINED_BROKE)
        lived_s, ran_s = self._oldest(lease, now)
        loss = Loss(
            state.unit.name,
            state.unit.url,
            ask.fingerprint,
            ask.model or "",
            lease.opened_at,
            now,
            tokens,
            shown,
            is_loss=is_loss,
            is_reply=kind is FailureKind.UNIT_ERROR and state.case.verdict is Verdict.UP,
            is_silent=kind in _SILENT,
            worked_at=state.progress_at,
            payer=ask.payer,
            cell=state.unit.cell,
            lived_s=lived_s,
            ran_s=ran_s,
            up_s=now - state.up_since,
        )
        self.counts["deaths"] += kind in _CONTAINED_LOST
        self.watchful = True
        there, places = partial(self._there, loss.place), len({each.unit.url for each in self._board})
        if self.ledger.lost(loss, there, works=self._works(state), places=places) is PromptVerdict.ENDS:
            self._end(ask.fingerprint)
        self._serve_soon()

    def flipped(self, flip: Flip) -> None:
        if flip.after is Verdict.UP and flip.before is not Verdict.SUSPECT:
            for gone in self._answered_before.keys() - self._board.units.keys():
                del self._answered_before[gone]
            self._answered_before[flip.unit] = self._answered(flip.unit)
        elif flip.after in (Verdict.DOWN, Verdict.STARTING) and flip.unit in self._board.units:
            for fingerprint in self.ledger.fell(self._board.units[flip.unit].unit.url, flip.at):
                self._end(fingerprint)

    def closed(self, lease: Lease, outcome: Outcome) -> None:
        """An attempt has ended. To be called while there is something to contain."""
        fingerprint = lease.ask.fingerprint
        if outcome is Outcome.OK:
            self._given_up.pop(fingerprint, None)
        if outcome is Outcome.OK and fingerprint in self.ledger.records:
            self.ledger.answered(fingerprint)
            if self.bans.find(fingerprint, self._now()) is not None:
                self.lift(fingerprint, "the gate: it was answered whole")
        self._serve_soon()

    def tick(self, now: float) -> None:
        if self.watchful:
            self.ledger.tick(now)
            self._note_outlived(now)
            self.bans.tick(now)
            self._reported &= self.ledger.records.keys()
            self._given_up = {f: last for f, last in self._given_up.items() if now - last[1] < MEMORY_S}
            self.watchful = bool(self.ledger.records or len(self.bans) or self._held or self._given_up)
            self._serve()

    # -- for searches --------------------------------------------------------------------------------------

    def pick(self, ask: Ask, tried: tuple[str, ...], *, evicted: bool, retry: bool) -> Lease | Refusal:
        """`Router.pick` for a prompt that may be suspected. HELD: it may wait until others are cleared."""
        if self.bars(ask, tried):
            return Refusal.POISON
        now, record = self._now(), self.ledger.records.get(ask.fingerprint)
        pick = partial(self._pick, ask, now, evicted=evicted, retry=retry)
        if record is not None and record.is_to_wait(now):
            return Refusal.HELD
        if record is None or record.marks[-1].is_over:
            return pick(tried)
        trial = record.on_trial() if record.standing else None
        # Two units work on one attempt of a split request.
        is_leg = trial is not None and trial.split is not None and trial.split.prefiller == ask.unit
        if trial is not None and not is_leg and (record.is_suspect or now - trial.opened_at < SIBLING_S):
            return Refusal.HELD
        answer = self._find(ask, record, tried, pick, now)
        if isinstance(answer, Lease) and not is_leg:
            self.ledger.placed(record, answer)
        return answer

    def bars(self, ask: Ask, tried: Collection[str]) -> bool:
        """Whether it must not be sent to any unit."""
        if self.bans.find(ask.fingerprint, self._now(), ask.payer) is not None:
            return True
        if self._is_given_up(ask, tried):
            return True
        record = self.ledger.records.get(ask.fingerprint)
        return record is not None and record.ended and bool(tried)

    def failure(self, ask: Ask, tried: Collection[str]) -> Failure:
        """The failure for a client whose request must not be sent to any unit."""
        ban = self.bans.find(ask.fingerprint, self._now(), ask.payer)
        mark = fingerprint_name(ask.fingerprint)
        if ban is None and self._is_given_up(ask, tried):
            reason = (
                "units showed nothing for so long while they had this request that they were given up; it is "
                "sent to no more of them; shorten the prompt, or make the units faster"
            )
            return Failure(FailureKind.EVICTED, reason)
        self.counts["ended" if tried else "refused"] += 1
        rest = f", for another {ban.until - self._now():.0f} s" if ban is not None else ""
        reason = (
            f"units failed while they computed this prompt ({mark}); it is refused{rest}; change the prompt"
        )
        return Failure(FailureKind.POISON_SUSPECTED, reason)

    def hold(self, ask: Ask, tried: tuple[str, ...], on_result: OnResult) -> HeldRequest | None:
        """Wait; `on_result` is called once, later. None: too many wait, or no unit could serve it."""
        if not self._board.could_serve(ask, tried):
            return None
        if len(self._held) >= LIMITS.poison_held:
            reached("poison_held")
            return None
        held = HeldRequest(ask, tried, self._now(), on_result)
        self._held[held] = None
        return held

    def leave(self, held: HeldRequest) -> None:
        """The request waits no more."""
        self._held.pop(held, None)

    @property
    def held(self) -> int:
        """How many wait."""
        return len(self._held)

    # -- for operators, and for other gates ----------------------------------------------------------------

    def take(self, ban: Ban) -> None:
        """Add a ban of another gate."""
        if self.ban_s and self.bans.add(ban):
            self.watchful = True

    def lift(self, fingerprint: int, by: str, *, tell: bool = True) -> bool:
        """Lift a ban and clear the prompt; False when there is no ban. `tell`: publish it to other gates."""
        ban = self.bans.lift(fingerprint)
        self.ledger.answered(fingerprint)
        if ban is None:
            return False
        self._events.add(Action("poison_lifted", by, detail=fingerprint_name(fingerprint)))
        if tell:
            self.on_ban(ban, True)
        self._serve_soon()
        return True

    # -- inside --------------------------------------------------------------------------------------------

    def _note_outlived(self, now: float) -> None:
        """Others of a prompt that units died under may have gone on, at units that work. Where they have
        passed that point, it was not the prompt: somebody restarts units, one by one.
        """
        suspects = self.ledger.waiting()
        if now < self._looked_at + OUTLIVED_LOOK_S:
            return
        self._looked_at = now
        runs: dict[Lease, float] = {}
        longest: dict[tuple[int, str], float] = {}
        for state in self._board if suspects else ():
            if not state.leases or not state.is_usable() or state.load is None:
                continue
            for lease, since in self._running(state, state.load.waiting, suspects, now):
                runs[lease] = since
                key = lease.ask.fingerprint, state.unit.cell
                longest[key] = max(state.progress_at - since, longest.get(key, 0.0))
        self._runs = runs
        for (fingerprint, cell), ran_s in longest.items():
            self.ledger.outlived(fingerprint, cell, ran_s, now)

    def _running(
        self, state: UnitState, waiting: int, suspects: Collection[int], now: float
    ) -> Iterator[tuple[Lease, float]]:
        """Requests of suspected prompts at a unit, and since when it computes them. If some of all wait
        there, these are the last ones that came: an engine has no reason to prefer one of equals.
        """
        looked = [
            lease
            for lease in islice(state.leases, OUTLIVED_LOOKS)
            if lease.ask.fingerprint in suspects and not lease.evicted
        ]
        of_prompt = Counter(lease.ask.fingerprint for lease in looked)
        seen: Counter[int] = Counter()
        for lease in looked:
            fingerprint = lease.ask.fingerprint
            seen[fingerprint] += 1
            since = self._runs.get(lease, inf)
            if since == inf and seen[fingerprint] <= of_prompt[fingerprint] - waiting:
                # What moves after a death makes those wait that come later.
                is_new = lease not in self._runs and (not waiting or lease.opened_at < self.ledger.last_at)
                since = lease.opened_at if is_new else now
            yield lease, since

    def _oldest(self, lost: Lease, now: float) -> tuple[float, float]:
        """How long its unit had one of this prompt, and is known to have computed one: it dies of the
        first one that comes to the point, and all the others break with it.
        """
        state, fingerprint = lost.unit_state, lost.ask.fingerprint
        known, longest = self._lives.get((state.unit.name, fingerprint), (-inf, (0.0, 0.0)))
        lived_s, ran_s = longest if known == now else (0.0, 0.0)
        waits = state.load is None or state.load.waiting
        for lease in (lost, *(() if known == now else islice(state.leases, OUTLIVED_LOOKS))):
            if lease.ask.fingerprint == fingerprint:
                since = self._runs.get(lease, inf if waits else lease.opened_at)
                lived_s, ran_s = max(lived_s, now - lease.opened_at), max(ran_s, state.progress_at - since)
        if known != now:
            # Of a unit that dies many break in the same turn.
            self._lives = {each: life for each, life in self._lives.items() if life[0] == now}
        self._lives[state.unit.name, fingerprint] = now, (lived_s, ran_s)
        return lived_s, ran_s

    def _given_up_under(self, ask: Ask) -> frozenset[str]:
        """The units that were given up by a time-out of ours while they had this prompt."""
        return self._given_up.get(ask.fingerprint, (frozenset(), 0.0))[0]

    def _is_given_up(self, ask: Ask, tried: Collection[str]) -> bool:
        """Whether so many of the units that were tried were given up that it goes to no further one."""
        return len(self._given_up_under(ask).intersection(tried)) >= GIVEN_UP_MOST

    def _there(self, place: str) -> list[int]:
        """The prompts of all units that are reached there."""
        return [
            lease.ask.fingerprint
            for state in self._board
            if state.unit.url == place
            for lease in state.leases
        ]

    def _works(self, state: UnitState) -> bool:
        """Whether the unit has answered other requests since it came up, or is doing so now."""
        name = state.unit.name
        before = self._answered_before.get(name, 0)
        return self._answered(name) > before or any(lease.committed for lease in state.leases)

    def _end(self, fingerprint: int) -> None:
        """This prompt ends units: report it, and refuse it if that is proven."""
        record, now = self.ledger.records[fingerprint], self._now()
        payer = next(iter(record.payers)) if len(record.payers) == 1 else ""
        known = self.bans.find(fingerprint, now)
        if known is not None and known.payer in ("", payer):
            return
        is_many = len(self._banned_at) == BANS_A_MINUTE and now - self._banned_at[0] < 60.0
        if not self.ban_s or is_many or not self.ledger.is_proven(fingerprint):
            self._tell(fingerprint, record, 0.0)
            return
        self._banned_at.append(now)
        ban = Ban(fingerprint, record.model, now, now + self.ban_s, record.units(), payer=payer)
        self.bans.add(ban)
        self.counts["bans"] += 1
        self._tell(fingerprint, record, self.ban_s)
        self.on_ban(ban, False)

    def _tell(self, fingerprint: int, record: PoisonRecord, ban_s: float) -> None:
        if not ban_s and fingerprint in self._reported:
            return
        self._reported.add(fingerprint)
        mark, what = fingerprint_name(fingerprint), f"model {record.model}" if record.model else "no model"
        whom = (
            f"to {next(iter(record.payers))} " if len(record.payers) == 1 and "" not in record.payers else ""
        )
        then = (
            f"its requests are ended and refused {whom}for {ban_s:g} s (poison_suspected in the access log); "
            f"to allow it again: `cellgate poison clear {mark}`"
            if ban_s
            else "its requests are ended; the prompt is not refused: bans are off, it is not proven, or "
            "too many prompts were refused within a minute; check the units"
        )
        detail = f"prompt {mark} ({what}) was in flight when {' and '.join(record.units())} died; {then}"
        self._events.add(Action("poison", "gate", detail=detail))

    def _find(
        self,
        ask: Ask,
        record: PoisonRecord,
        tried: tuple[str, ...],
        pick: Callable[..., Lease | Refusal],
        now: float,
    ) -> Lease | Refusal:
        """A unit for a prompt that was in flight when a unit died."""
        if record.is_suspect:
            if now - self.ledger.last_at < SPACE_S:
                return Refusal.HELD
            shut = self.ledger.suspected()
            answer = pick((*tried, *shut))
            return Refusal.HELD if shut and isinstance(answer, Refusal) else answer
        at_hand = [state.unit for state in self._board.able(ask, tried)]
        # What is reached by way of the gate with which a unit was lost may be as dead.
        death = record.marks[-1].death
        dead = {unit.name for unit in at_hand if unit.url == death.place and unit.name != death.unit}
        crowded = dead | self.ledger.crowded(record, {unit.name for unit in at_hand} - dead)
        answer = pick((*tried, *crowded)) if crowded else Refusal.FULL
        return answer if isinstance(answer, Lease) else pick(tried)

    def _serve_soon(self) -> None:
        if self._held and not self._serving:
            self._serving = True
            self._soon(self._serve)

    def _serve(self) -> None:
        """Give units to held requests, in the order in which they lost theirs."""
        self._serving = False
        now = self._now()
        for held in list(islice(sorted(self._held, key=self._since), CONTAINED_LOOKS)):
            if held not in self._held:
                continue
            answer = self.pick(held.ask, held.tried, evicted=bool(held.tried), retry=False)
            settled = isinstance(answer, Lease) or answer in (Refusal.POISON, Refusal.UNKNOWN_MODEL)
            hopeless = now - held.entered_at >= MOVED_S or not self._board.could_serve(held.ask, held.tried)
            if settled or hopeless:
                del self._held[held]
                held.on_result(Refusal.NO_UNIT if answer is Refusal.HELD else answer)

    def _since(self, held: HeldRequest) -> tuple[float, float]:
        record = self.ledger.records.get(held.ask.fingerprint)
        return record.since if record is not None else held.entered_at, held.entered_at


class Pick(Protocol):
    """`Router.pick`."""

    def __call__(
        self, ask: Ask, now: float, tried: Iterable[str], *, evicted: bool, retry: bool
    ) -> Lease | Refusal: ...


@dataclass(eq=False, frozen=True, slots=True)
class HeldRequest:
    """A request that waits for the proof of a suspected prompt. `on_result` is called once, or it leaves."""

    ask: Ask
    tried: tuple[str, ...]
    entered_at: float
    on_result: OnResult


def _stood_still(lease: Lease) -> bool:
    """Whether its unit had work, and showed nothing, before it was given this request and ever since."""
    return lease.unit_state.quiet_since < lease.opened_at - STILL_S


def fingerprint_name(fingerprint: int) -> str:
    """A fingerprint as text, for people and other gates."""
    return f"{fingerprint:016x}"


def listing(containment: Containment, now: float) -> dict[str, Any]:
    """The prompts that are refused, and how many are suspected."""
    return {
        "ban_s": containment.ban_s,
        "bans": [_entry(ban, now) for ban in containment.bans.all()],
        "suspects": sum(
            record.is_suspect and not record.ended for record in containment.ledger.records.values()
        ),
        "held": containment.held,
    }


def _entry(ban: Ban, now: float) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint_name(ban.fingerprint),
        "model": ban.model,
        "units": list(ban.units),
        "age_s": round(now - ban.since, 1),
        "left_s": round(ban.until - now, 1),
        "gate": ban.gate,
    }


def poison_metrics(containment: Containment) -> Iterator[Metric]:
    contained = containment
    counts = contained.counts
    yield one_counter("poison_bans", "Prompts that this gate decided to refuse.", counts["bans"])
    yield counter(
        "poison_requests",
        "Attempts that ended with the loss of their unit or its connection (`died`), requests ended "
        "because units had died of their prompt, and those that were refused before a unit got them.",
        "result",
        [("died", counts["deaths"]), ("ended", counts["ended"]), ("refused", counts["refused"])],
    )
    suspects = sum(record.is_suspect for record in contained.ledger.records.values())
    yield gauge(
        "poison",
        "Prompts that are refused now (`banned`), in flight when two units died and still "
        "suspected (`suspect`), requests that wait until such a one is proven or cleared (`held`).",
        "state",
        [("banned", len(contained.bans)), ("suspect", suspects), ("held", contained.held)],
    )
