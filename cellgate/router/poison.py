"""The ledger of deaths: which request may be ending its units. Pure: times are passed in.

A *death* is of a unit: its process is lost, or it is out soon after it broke connections of requests that it
had taken. The request that caused it, if any, is not visible. Visible is which requests were there, and which
are there again when the next unit dies. Requests are identified by the fingerprint of their prompt
(`Ask.fingerprint`), so that many clients with one prompt are one. Rules:
1. After the first death its requests move as usual, spread over the other units.
2. After the second, a request that was alone there both times is ended. If there were several, each is a
   suspect and moves on, at most one to a unit.
3. So the third death identifies the request, and there is no fourth.
4. It is refused to who asked for it, until units have died for two payers: a client bans its own prompts.
5. A death counts only until the request, or another one of its prompt, has passed the point at which it
   died, because a poisonous prompt ends units at the same point each time: so does one that was computed for
   longer before it died itself, unless three died after as many tokens: units may differ in speed. One that
   is answered in full is innocent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cellgate.router.unit_state import Lease


MEMORY_S = 600.0
"""A death is forgotten after so long."""
MARKS_MAX = 16
"""The most deaths that are kept for a fingerprint: the last ones."""
POISON_JOINED_S = 2.0
"""Requests of one unit that break within this time belong to one death."""
SETTLED_S = 0.25
"""After this long it is known which requests belong to a death."""
FALL_S = 3.0
"""Errors of an engine that is lost this soon after count as its death."""
AT_ONCE_S, AT_ONCE = 1.0, 3
"""This many units that die within this time without a common request have died of something else."""
SHARED_S = 20.0
"""When all units fall silent within this time, with no request on all of them, they share another cause."""
SLACK_TOKENS = 8
"""A request is past the point of a death after this many more tokens: the last ones may not have arrived."""
OUTLIVED, OUTLIVED_S = 1.15, 1.5
"""Another request of the prompt, in the same cell, is past the point of a death after so many times as long,
and at least so much longer: units of a cell are about as fast."""
RAN_S = 60.0
"""For so long it is known how long the prompt was computed: later units may be less busy."""
STRIDE = 0.1
"""Deaths at the same number of tokens of an attempt, within this share, have one cause."""
UP_LONGER = 2.0
"""A unit that was up for less than so many times as long as its oldest request says nothing by its age."""
PAYERS = 2
"""For so many payers units must have died, before a prompt is refused to all."""
SPACE_S = 1.0
"""The pause of a suspect after a unit has died: more may die of the same cause."""
SIBLING_S = 5.0
"""How long other requests with the same prompt wait for the first one after a death."""
MOMENT_S, USUAL_S = 0.05, 0.25
"""A unit that dies within a moment of getting a request that lived this long elsewhere was dying already, as
units do that fail in one instant. That is believed once for a request."""
COMMITTED_S, SHOWN_S = 0.25, 1.0
"""How long a suspect must send tokens to be cleared: if it died before its first one, and otherwise."""
UNSHOWN_S = 5.0
"""Others do not wait for a suspect that sends nothing for this much longer than twice its earlier life."""


class Ledger:
    """Deaths and their requests at one gate. `records` are by fingerprint, the one lost longest ago first.

    There are at most `limit` of them; `reached` is called for each that has to go.
    """

    def __init__(self, limit: int = 4096, reached: Callable[[], None] = lambda: None) -> None:
        self.records: dict[int, PoisonRecord] = {}
        self._limit = limit
        self._reached = reached
        self.last_at = -SPACE_S
        """When the last death was."""
        self._deaths: dict[str, Death] = {}
        """The last one of each place."""

    # -- what happens --------------------------------------------------------------------------------------

    def lost(
        self, loss: Loss, there: Callable[[], Iterable[int]], *, works: bool, places: int = 0
    ) -> PromptVerdict:
        """A unit has died under a request. `there`: the fingerprints of all that it has now; `places`: how
        many places units are at, in all.
        """
        death = self._death(loss, there, works=works)
        if death.lost_at is None:
            death.lost_at = loss.at if loss.is_loss else None
        elif loss.opened_at > death.lost_at:
            # The unit was dead before it came.
            return PromptVerdict.MOVES
        record = self.records.pop(loss.fingerprint, None) or PoisonRecord(loss.opened_at, loss.model)
        self.records[loss.fingerprint] = record
        record.at = loss.at
        if len(record.payers) < PAYERS:
            record.payers |= {loss.payer}
        if record.meets_one_dying(loss, death):
            return PromptVerdict.MOVES
        death.died.add(loss.fingerprint)
        record.marks = _weighed(_noted(record.marks, _mark(death, loss)))
        record.outlive(loss.cell, loss.ran_s, loss.at)
        death.is_silent = death.is_silent and loss.is_silent
        self._note_many(death)
        self._note_shared(loss.at, places)
        if len(self.records) > self._limit:
            self._reached()
            del self.records[next(iter(self.records))]
        return self._verdict(loss.fingerprint, record, loss.at)

    def fell(self, place: str, now: float) -> list[int]:
        """A unit is lost: recent errors of its engine count as its death. Returns the fingerprints to end."""
        death = self._deaths.get(place)
        if death is None or now - death.last_at >= FALL_S:
            return []
        death.lost_at = now if death.lost_at is None else death.lost_at
        met = [(each, self.records[each]) for each in sorted(death.died) if each in self.records]
        return [each for each, record in met if self._verdict(each, record, now) is PromptVerdict.ENDS]

    def waiting(self) -> frozenset[int]:
        """The prompts of deaths that they have not passed."""
        return frozenset(
            fingerprint
            for fingerprint, record in self.records.items()
            if not all(mark.is_over for mark in record.marks)
        )

    def outlived(self, fingerprint: int, cell: str, ran_s: float, now: float) -> None:
        """One of its requests has been computed for so long in this cell: past the deaths before that."""
        self.records[fingerprint].outlive(cell, ran_s, now)

    def answered(self, fingerprint: int) -> None:
        """A request was answered in full: it is innocent."""
        self.records.pop(fingerprint, None)

    def tick(self, now: float) -> None:
        """Clear requests that have passed their deaths, and forget old ones."""
        for fingerprint, record in list(self.records.items()):
            if now - record.at > MEMORY_S:
                del self.records[fingerprint]
            elif record.trial is not None and (record.trial.closed or _is_past(record, record.trial, now)):
                record.trial = None
        self._deaths = {place: death for place, death in self._deaths.items() if now - death.at < MEMORY_S}

    # -- what follows --------------------------------------------------------------------------------------

    def crowded(self, record: PoisonRecord, units: Collection[str]) -> set[str]:
        """The units with more than their part of the requests of one death."""
        placed = record.marks[-1].death.placed
        least = min((placed[unit] for unit in units), default=0)
        return {unit for unit in units if placed[unit] > least}

    def suspected(self) -> set[str]:
        """The units that have a suspect."""
        leases = [record.on_trial() for record in self.records.values() if record.is_suspect]
        return {lease.unit for lease in leases if lease is not None}

    def placed(self, record: PoisonRecord, lease: Lease) -> None:
        """A request of a death was given a unit."""
        record.trial = lease
        record.marks[-1].death.placed[lease.unit] += 1

    def is_proven(self, fingerprint: int) -> bool:
        """Whether it caused its deaths: it was alone there, or others have passed the same point."""
        standing = self.records[fingerprint].standing
        return all(mark.death.works or mark.death.there <= {fingerprint} for mark in standing)

    # -- inside --------------------------------------------------------------------------------------------

    def _death(self, loss: Loss, there: Callable[[], Iterable[int]], *, works: bool) -> Death:
        death = self._deaths.get(loss.place)
        if death is None or not death.is_of(loss):
            those = frozenset((*there(), loss.fingerprint))
            death = Death(loss.unit, loss.place, loss.at, those, works, loss.cell)
            self._deaths[loss.place] = death
        death.last_at = self.last_at = loss.at
        return death

    def _note_many(self, death: Death) -> None:
        near = [other for other in self._deaths.values() if abs(other.at - death.at) <= AT_ONCE_S]
        if len(near) >= AT_ONCE:
            sizes, everybody = (len(other.died) for other in near), set().union(*(one.died for one in near))
            is_many = sum(sizes) == len(everybody)
            for one in near:
                one.is_many = is_many

    def _note_shared(self, now: float, places: int) -> None:
        """All units have fallen silent, whatever each was computing: that was no request."""
        near = [death for death in self._deaths.values() if death.is_silent and now - death.at <= SHARED_S]
        if len(near) >= max(places, 2) and not set.intersection(*(death.died for death in near)):
            for death in near:
                death.is_many = True

    def _verdict(self, fingerprint: int, record: PoisonRecord, now: float) -> PromptVerdict:
        standing = record.standing
        strides = tuple(mark for mark in _of_one_stride(record.marks) if mark.death.lost_at is not None)
        if len(standing) > 1 or len(strides) > 2:
            suspected = standing if len(standing) > 1 else strides
            if self._is_alone(fingerprint, suspected, now):
                record.ended = True
                return PromptVerdict.ENDS
        return PromptVerdict.SUSPECT if len(standing) > 1 else PromptVerdict.MOVES

    def _is_alone(self, fingerprint: int, marks: tuple[Mark, ...], now: float) -> bool:
        """Whether no other request was in all of these deaths."""
        *before, last = (mark.death for mark in marks)
        return not any(self._has_met(other, before) for other in last.who(now) if other != fingerprint)

    def _has_met(self, fingerprint: int, deaths: Collection[Death]) -> bool:
        record = self.records.get(fingerprint)
        return record is not None and all(
            any(mark.death is death and not mark.is_over for mark in record.marks) for death in deaths
        )


class PromptVerdict(Enum):
    """What happens to a request whose unit has died."""

    MOVES = "moves"
    SUSPECT = "suspect"
    ENDS = "ends"


@dataclass(eq=False, slots=True)
class Death:
    """One death of a unit, or of all at one place. `there` are the fingerprints of all it had, `died` of
    those that broke with it.

    `works`: it had answered others in that life, or was just doing so. `lost_at`: when it came to be more
    than errors that its engine reported (None: these need not be its last words, and do not count); what came
    to the unit until then, and breaks with it, has met the same death.
    `is_many`: others died at once, so that no request was it. `is_silent`: it broke no connection, it only
    showed nothing any more. `placed`: to how many of them each unit was given afterwards.
    """

    unit: str
    place: str
    at: float
    there: frozenset[int]
    works: bool
    cell: str = ""
    died: set[int] = field(default_factory=set)
    placed: Counter[str] = field(default_factory=Counter)
    last_at: float = 0.0
    lost_at: float | None = None
    is_many: bool = False
    is_silent: bool = True

    def is_of(self, loss: Loss) -> bool:
        """Whether a loss is of this death, and not of another one."""
        if self.lost_at is None:
            return loss.at - self.at <= POISON_JOINED_S
        # A moved request may get another unit there, or the same one before it is seen to be dead, and break
        # on a connection that was kept.
        was_there = loss.opened_at <= self.lost_at or loss.unit != self.unit or loss.worked_at <= self.lost_at
        return was_there and loss.at - self.last_at <= POISON_JOINED_S

    def who(self, now: float) -> Collection[int]:
        """The requests of this death, as far as known."""
        return self.died if now - self.at > SETTLED_S else self.died | self.there


@dataclass(frozen=True, slots=True)
class Loss:
    """A request has lost its unit. `tokens`: shown to its client in all; `shown`: of these by this unit.

    `place` is where the unit is reached: units behind one gate are lost together when that gate is, which is
    one death.
    `is_loss`: it was more than an error that its engine reported; `is_reply`: it was no more than a reply of
    a unit that seems well, to which there is a bound of its own; `is_silent`: the gate has given it up;
    `worked_at`: when the unit last showed that it works, which was up for `up_s`; `payer`: who asked. Of the
    same prompt at the unit the one that it had longest was there for `lived_s`, of which it is known to have
    been computed for `ran_s`.
    """

    unit: str
    place: str
    fingerprint: int
    model: str
    opened_at: float
    at: float
    tokens: int = 0
    shown: int = 0
    is_loss: bool = True
    is_reply: bool = False
    is_silent: bool = False
    worked_at: float = inf
    payer: str = ""
    cell: str = ""
    lived_s: float = 0.0
    ran_s: float = 0.0
    up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A death of a fingerprint, and how far the request had come; of several, the furthest. `passed`: it, or
    another one, has come further; `outlived`: it was computed for longer elsewhere; `up_s`: for how long the
    unit was up.
    """

    death: Death
    tokens: int
    shown: int
    lived_s: float
    up_s: float
    is_reply: bool = False
    passed: bool = False
    outlived: bool = False

    @property
    def is_over(self) -> bool:
        """Whether this death was not the prompt's, as far as known."""
        return self.passed or self.outlived


@dataclass(eq=False, slots=True)
class PoisonRecord:
    """The record of one fingerprint. `since`: when the first that died was sent; `trial`: its attempt;
    `met_one_dying`: it came to a unit that was dying already.

    `ended`: it is the one; where its deaths cannot be its alone, only those that were there are ended.
    """

    since: float
    model: str = ""
    marks: tuple[Mark, ...] = ()
    trial: Lease | None = None
    ended: bool = False
    met_one_dying: bool = False
    at: float = 0.0
    payers: frozenset[str] = frozenset()
    """For whom units have died; two are enough."""
    ran: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By cell: how long it was computed there at most, and when that was seen."""

    def outlive(self, cell: str, ran_s: float, now: float) -> None:
        """It was computed for so long in this cell: deaths after less, also the next ones, are not its."""
        longest_s, at = self.ran.get(cell, (0.0, now))
        if ran_s >= longest_s or now - at > RAN_S:
            longest_s, at = ran_s, now
        self.ran[cell] = longest_s, at
        self.marks = tuple(
            replace(mark, outlived=True)
            if mark.death.cell == cell and longest_s > _outlived_s(mark.lived_s)
            else mark
            for mark in self.marks
        )

    def meets_one_dying(self, loss: Loss, death: Death) -> bool:
        """Whether the unit was dying already, by a cause that it shares with the one before."""
        is_so = (
            not self.met_one_dying
            and loss.at - loss.opened_at < MOMENT_S
            and any(mark.lived_s > USUAL_S and loss.at - mark.death.at < MOMENT_S for mark in self.marks)
            and len(death.there) > 1
        )
        self.met_one_dying = self.met_one_dying or is_so
        return is_so

    @property
    def standing(self) -> tuple[Mark, ...]:
        """The deaths that it has not passed."""
        return tuple(
            mark
            for mark in self.marks
            if mark.death.lost_at is not None and not (mark.is_over or mark.death.is_many)
        )

    def is_to_wait(self, now: float) -> bool:
        """Whether it must wait: two units have just failed, or one and before it several that replied with an
        error, or three after as many tokens, and it is not clear yet whether they died.
        """
        is_over = self.marks[-1].is_over
        unpassed = [mark for mark in self.marks if not (is_over or mark.is_over)]
        failed = sum(not mark.is_reply for mark in unpassed)
        is_many = failed > 1 or (failed == 1 and len(unpassed) > 2) or len(_of_one_stride(self.marks)) > 2
        return is_many and now - self.at < SPACE_S

    @property
    def is_suspect(self) -> bool:
        """Whether it may share a unit with no other suspect."""
        return len(self.standing) > 1

    def units(self) -> tuple[str, ...]:
        """The units that died under it."""
        return tuple(dict.fromkeys(mark.death.unit for mark in self.marks))

    def on_trial(self) -> Lease | None:
        """Its attempt, as long as that is open."""
        return self.trial if self.trial is not None and not self.trial.closed else None


def _mark(death: Death, loss: Loss) -> Mark:
    lived_s = max(loss.at - loss.opened_at, loss.lived_s)
    return Mark(death, loss.tokens, loss.shown, lived_s, loss.up_s, loss.is_reply)


def _noted(marks: tuple[Mark, ...], new: Mark) -> tuple[Mark, ...]:
    """The marks with one more; of one death the furthest that its requests had come."""
    for at, mark in enumerate(marks):
        if mark.death is new.death:
            tokens, lived_s = max(mark.tokens, new.tokens), max(mark.lived_s, new.lived_s)
            shown, outlived = max(mark.shown, new.shown), mark.outlived and lived_s == mark.lived_s
            wider = replace(mark, tokens=tokens, shown=shown, lived_s=lived_s, outlived=outlived)
            return (*marks[:at], wider, *marks[at + 1 :])
    return (*marks, new)


def _outlived_s(lived_s: float) -> float:
    """How long another request must be at a unit, to be past the death of one that lived so long."""
    return max(OUTLIVED * lived_s, lived_s + OUTLIVED_S)


def _weighed(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """The marks, those passed noted that are nearer to the beginning than the request has come since."""
    furthest = max(mark.tokens for mark in marks)
    return tuple(
        replace(mark, passed=True) if mark.tokens + SLACK_TOKENS < furthest else mark
        for mark in marks[-MARKS_MAX:]
    )


def _of_one_stride(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """Those that came after as many tokens of an attempt as the last one; or, where none were shown, after as
    long at units that had been up for longer: of those restarted in turn, again and again, the oldest
    requests are all as old as the unit.
    """
    shown, lived_s = marks[-1].shown, marks[-1].lived_s
    if not shown:
        alike = [mark for mark in marks if abs(mark.lived_s - lived_s) <= STRIDE * lived_s]
        return tuple(mark for mark in alike if not mark.shown and mark.up_s > UP_LONGER * mark.lived_s)
    near = 2 + STRIDE * shown
    return tuple(mark for mark in marks if abs(mark.shown - shown) <= near)


def _is_past(record: PoisonRecord, lease: Lease, now: float) -> bool:
    """Whether others need not wait for an attempt any more; one that sends tokens is cleared."""
    if not lease.committed:
        longest_s = max(mark.lived_s for mark in record.marks)
        return now - lease.opened_at > UNSHOWN_S + 2.0 * longest_s
    least_s = SHOWN_S if any(mark.tokens for mark in record.standing) else COMMITTED_S
    if now - lease.first_at < least_s:
        return False
    record.marks = tuple(replace(mark, passed=True) for mark in record.marks)
    return True


# Prompts that are refused for a while, by fingerprint: bounded, expiring. Pure: times are passed in.


@dataclass(frozen=True, slots=True)
class Ban:
    """A prompt that has ended units. `units` are those that it ended, `gate` the other gate that published
    it.

    `since` and `until` are times of this gate's loop, in seconds.
    """

    fingerprint: int
    model: str
    since: float
    until: float
    units: tuple[str, ...] = ()
    gate: str = ""
    payer: str = ""
    """To whom alone it is refused; empty: to all."""


class Bans:
    """The valid bans, at most `limit`; `reached` is called for each that is dropped for a newer one."""

    def __init__(self, limit: int = 1024, reached: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._reached = reached
        self._bans: dict[int, Ban] = {}

    def __len__(self) -> int:
        return len(self._bans)

    def add(self, ban: Ban) -> bool:
        """Add a ban; False when one that lasts as long exists already. Those of two payers hold for all."""
        known = self._bans.get(ban.fingerprint)
        if known is not None and known.payer != ban.payer:
            if not known.payer and known.until >= ban.until:
                return False
            ban = replace(ban, payer="", until=max(known.until, ban.until))
        elif known is not None and known.until >= ban.until:
            return False
        self._bans.pop(ban.fingerprint, None)
        self._bans[ban.fingerprint] = ban
        if len(self._bans) > self._limit:
            self._reached()
            del self._bans[min(self._bans, key=lambda each: self._bans[each].until)]
        return True

    def find(self, fingerprint: int, now: float, payer: str | None = None) -> Ban | None:
        """The ban on a prompt, for this payer; None: for any."""
        ban = self._bans.get(fingerprint)
        if ban is None or now >= ban.until:
            return None
        return ban if payer is None or ban.payer in ("", payer) else None

    def lift(self, fingerprint: int) -> Ban | None:
        """Lift a ban; returns it, if it was valid."""
        return self._bans.pop(fingerprint, None)

    def tick(self, now: float) -> None:
        """Forget those that have ended."""
        for fingerprint in [each for each, ban in self._bans.items() if now >= ban.until]:
            del self._bans[fingerprint]

    def all(self) -> list[Ban]:
        """The valid bans, the oldest first."""
        return list(self._bans.values())
