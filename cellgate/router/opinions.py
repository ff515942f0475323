"""Second opinions: whose fault is an answer that is not good, the unit's or the request's? Pure.

A unit alone cannot tell; the others can. Each request is of a *kind*: model, path, and what it needs (images,
tools, a stream). Rules:
1. Another unit is asked before a doubtful answer is shown. It serves the request: that speaks against the
   first. A unit that has served others says the same: it is the request, and all are cleared.
2. Where it is known to be the request, few are asked again. What is spent on opinions that change nothing is
   a share of the requests; an opinion that gets the client a good answer is free. While one is awaited,
   further doubtful answers of its unit are held: they come in bursts. All this is by payer: whoever sends bad
   requests hides nothing of what a unit does to others.
3. What is held against a unit is weighed against its good answers, so that equals which answer badly by
   chance, or because somebody asks for it, stay equal. What it refuses of a kind, or of prompts longer than
   the longest that it served, goes to others.
4. That takes no unit out. It only raises the question, which the gate answers by requests of its own
   (proxy/control/refused_watch.py).
5. Nobody watches while nothing is doubtful: good answers cost nothing then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from cellgate.router.equals import chance_of

REFUSING_SOURCE = "second_opinion"
"""The source of evidence against a unit that refuses what others serve: an open fault until it serves it."""
HANDFUL = 5
"""So many requests that others served make a unit one that refuses such."""
_REFUSED, _SERVED = 2.5, 0.5
"""What the evidence against a unit is multiplied with, when another one serves what it refused, and with each
other answer. Of equals which answer badly with any probability p the mean is below one: a first answer that
is good, (1 - p) * 0.5; one that is not, nor that of the other, p * p * 0.5; one that is not while that of the
other is, p * (1 - p) * 2.5."""
_OPINION_SURE = 0.9 * _REFUSED**HANDFUL
_APART, _APART_MIN = 0.25, 4
"""A unit seems worse if so much more of its answers are doubtful than of others, of at least so many."""
_HARDLY = 0.002
"""So seldom chance explains what clients were answered. It proves nothing: they choose what they ask."""
OPINION_WATCH_S = 30.0
"""So long after the last doubtful answer good ones are counted as well."""
KNOWN_S = 300.0
"""So long after it what units refuse is forgotten."""
OWN_S = 30.0
"""So long it is believed that requests of a kind are themselves at fault."""
AGAIN = 10
"""Of doubtful answers of which that is believed, one in so many is asked again; the others pass."""
SHARE, BUDGET, BUDGET_OF_ALL = 0.015, 6.0, 24.0
"""What opinions that change nothing may cost: a share of the requests, and so many at once, of one payer and
of all."""
ATTEMPTED, COMPUTED = 2.0, 6.0
"""So many times as much costs one about an answer of a unit that generates, and about one that was computed:
a refusal takes no time of anybody."""
UNSURE_S = 2.0
"""So long a unit that gave a doubtful answer, and no good one, is not asked about others' answers."""
TRIAL_S = 3.0
"""How often a unit gets a request of a kind that it refuses: it may be mended."""
IN_FLIGHT_MAX = 64
"""Opinions that are asked at once about one unit."""
OPINIONS_MAX = 3
"""Units that are asked about one request."""
KINDS_MAX, OWN_MAX, PAYERS_MAX = 256, 1024, 1024
"""Kinds of which records are kept: clients may name any model; kinds of payers that are at fault themselves,
and budgets of payers."""
_OUTCOMES, _UNASKED, _COUNTED, _PROMPTS = 16, 10, 64, 16
_RARE = 0.1
"""Peers refuse at most this share, where a unit that nobody can be asked about refuses all."""


class Opinions:
    """What is known of whose fault doubtful answers are. `watching`: anything was doubtful recently."""

    def __init__(self) -> None:
        self.watching = False
        self._last_at = 0.0
        self._records: dict[Kind, dict[str, _Record]] = {}
        self._own: dict[tuple[Kind, str, str], _Own] = {}
        """Kinds of requests, what units say to them, and who asks, that are at fault themselves."""
        self._budget = BUDGET_OF_ALL
        self._budgets: dict[str, float] = {}
        """By payer; of who is not there: all of it."""
        self._arrived = 0
        """Requests since the last thing that was found."""

    # -- requests that come --------------------------------------------------------------------------------

    def arrived(
        self, kind: Kind, size: int, units: Collection[str], now: float, payer: str = ""
    ) -> tuple[str, ...]:
        """A request has come while watching: which of the `units` that could take it are to be spared it."""
        quiet_s = now - self._last_at
        if quiet_s > KNOWN_S or (quiet_s > OPINION_WATCH_S and not self._any_refuses()):
            self._forget()
            return ()
        self._save(payer, SHARE)
        self._arrived += 1
        records = self._records.get(kind)
        if not records:
            return ()
        spared = [name for name in units if name in records and self._is_spared(records[name], size, now)]
        return tuple(spared) if len(spared) < len(units) else ()

    def _is_spared(self, record: _Record, size: int, now: float) -> bool:
        if size > record.refuses_above():
            if now < record.trial_at:
                return True
            record.trial_at = now + TRIAL_S
            return False
        return record.is_awaited and not record.has_good

    def good(self, unit: str, kind: Kind, size: int) -> None:
        """A unit has served a request, or begun to, while watching."""
        record = self._record(unit, kind)
        if size > record.refuses_above():
            # It is mended.
            record.outcomes.clear()
            record.against_it = 1.0
        record.outcomes.append((size, True))
        record.weigh(_SERVED)
        record.count(is_bad=False)
        record.unasked = 0

    # -- answers in doubt ----------------------------------------------------------------------------------

    def doubt(
        self,
        unit: str,
        kind: Kind,
        what: str,
        asked: int,
        now: float,
        payer: str = "",
        *,
        is_broken: bool = False,
        cost: float = 1.0,
        is_counted: bool = False,
    ) -> Advice:
        """A unit has answered `what` to this payer, and `asked` others have no good answer either.
        `is_broken`: no request is answered like this. `cost`: of an opinion. `is_counted`: as a rate, before.
        """
        self.watching, self._last_at = True, now
        record, own = self._record(unit, kind), self._known(kind, what, payer)
        record.what, record.doubted_at = what, now
        if own is not None:
            # What is known to be the request says something about units only if they get it alike.
            record.own += 1
        elif not is_counted:
            record.count(is_bad=True)
        if asked >= OPINIONS_MAX:
            return Advice.SHOW
        if is_broken or (record.against and not record.has_good):
            if record.in_flight >= IN_FLIGHT_MAX:
                return Advice.SHOW if asked else Advice.HOLD
            self._opens(record, payer)
            return Advice.INSIST
        if own is not None:
            own.times += 1
        record.cost = cost
        if self._left(payer) < record.cost or (own is not None and own.times % AGAIN):
            return Advice.SHOW if own is not None or asked or not record.is_awaited else Advice.HOLD
        self._save(payer, -record.cost)
        # One that is known only looks again.
        self._opens(record, payer if own is None else None)
        return Advice.ASK

    def _known(self, kind: Kind, what: str, payer: str) -> _Own | None:
        own = self._own.get((kind, what, payer))
        return own if own is not None and self._last_at < own.until else None

    def _left(self, payer: str) -> float:
        return min(self._budget, self._budgets.get(payer, BUDGET))

    def _save(self, payer: str, more: float) -> None:
        """So much more, or less, may be asked."""
        self._budget = min(BUDGET_OF_ALL, self._budget + more)
        left = self._budgets.pop(payer, BUDGET) + more
        if left < BUDGET:
            self._budgets[payer] = left
            if len(self._budgets) > PAYERS_MAX:
                del self._budgets[next(iter(self._budgets))]

    def settled(self, unit: str, kind: Kind) -> int:
        """How many doubts about answers of this unit have come to something."""
        return self._record(unit, kind).settled

    def _opens(self, record: _Record, payer: str | None) -> None:
        record.in_flight += 1
        if payer is not None:
            record.pending[payer] = record.pending.get(payer, 0) + 1

    def dropped(self, unit: str, kind: Kind, payer: str = "", *, is_spent: bool = True) -> None:
        """Nothing is learnt of a doubt. Not `is_spent`: nobody could be asked."""
        record = self._closes(unit, kind, payer)
        if not is_spent:
            self._save(payer, record.cost)

    def _closes(self, unit: str, kind: Kind, payer: str) -> _Record:
        record = self._record(unit, kind)
        record.settled += 1
        record.in_flight = max(0, record.in_flight - 1)
        pending = record.pending.pop(payer, 0) - 1
        if pending > 0:
            record.pending[payer] = pending
        return record

    def served(
        self, first: str, by: str, kind: Kind, size: int, what: str, payer: str = "", *, is_fault: bool
    ) -> Refusing:
        """Another unit has served what this one refused: what is now known of it. Not `is_fault`: a unit of a
        mixed fleet may, whatever it is asked for.
        """
        record = self._closes(first, kind, payer)
        self._save(payer, record.cost)
        if self._known(kind, what, payer) is None:
            # Of who only looks again neither this counts nor that others say the same: a chance stays one.
            record.weigh(_REFUSED)
        self._own.pop((kind, what, payer), None)
        record.what = what
        record.outcomes.append((size, False))
        return self._published(self._found(first, record, kind, by=by, is_fault=is_fault))

    def same(
        self, first: str, second: str, kind: Kind, what: str, others: int, now: float, payer: str = ""
    ) -> bool:
        """The second unit says the same, and so many others were not asked. True: it is the request of this
        payer, which is known from now on.
        """
        if others and not (self._has_served(second) or self._has_served(first)):
            return False
        is_new = self._known(kind, what, payer) is None
        own = self._own.pop((kind, what, payer), _Own())
        own.until = now + OWN_S
        self._own[kind, what, payer] = own
        if len(self._own) > OWN_MAX:
            del self._own[next(iter(self._own))]
        records = self._records.get(kind, {})
        for record in records.values():
            record.pending.pop(payer, None)
            record.settled += 1
        if is_new and first in records:
            records[first].weigh(_SERVED)
        return True

    def unasked(self, unit: str, kind: Kind, what: str, now: float) -> Refusing | None:
        """Nobody can be asked about an answer: its share counts, beside that of the unit's peers."""
        self.watching, self._last_at = True, now
        record = self._record(unit, kind)
        record.unasked += 1
        record.what = what
        others = [each for name, each in self._records[kind].items() if name != unit]
        good = sum(flag for each in others for _, flag in each.outcomes)
        bad = sum(each.unasked + each.against for each in others)
        if record.unasked < _UNASKED or record.has_good or good < _UNASKED or bad > _RARE * good:
            return None
        return self._published(self._found(unit, record, kind))

    def by_rate(
        self,
        unit: str,
        kind: Kind,
        what: str,
        prompt: int,
        now: float,
        *,
        has_begun: bool = False,
        is_endless: bool = False,
    ) -> Refusing | None:
        """An answer that may be meant, or right: only where more answers of the unit are like this than of
        others, or others had none to give, it is looked at. `has_begun`: it was counted as a good one.
        """
        self.watching, self._last_at = True, now
        record = self._record(unit, kind)
        if prompt in record.prompts:
            return None
        record.prompts.append(prompt)
        record.what = what
        if has_begun:
            record.bad = min(record.bad + 1, record.total)
        else:
            record.count(is_bad=True)
        found = self._found(unit, record, kind)
        is_alone = not any(each.total for name, each in self._records[kind].items() if name != unit)
        is_worth_it = (found.is_apart or is_alone) and (has_begun or is_endless or record.total >= _APART_MIN)
        return self._published(found) if is_worth_it else None

    def apart(self, unit: str, kind: Kind) -> Refusing | None:
        """What is known of a unit of which nobody was asked, if more of its answers are doubtful."""
        record = self._record(unit, kind)
        if record.total + record.own < _APART_MIN:
            return None
        found = self._found(unit, record, kind)
        return self._published(found) if found.is_apart else None

    # -- units ---------------------------------------------------------------------------------------------

    def witnesses(self, names: Iterable[str]) -> list[str]:
        """Those of these units that have served others recently: their word counts."""
        return [name for name in names if self._has_served(name)]

    def unsure(self, kind: Kind, names: Iterable[str], now: float) -> list[str]:
        """Those of these units whose answers to such requests have been doubtful, and none good."""
        records = self._records.get(kind, {})
        return [
            name
            for name in names
            if (record := records.get(name)) is not None
            and now - record.doubted_at < UNSURE_S
            and not record.has_good
        ]

    def _found(
        self, unit: str, record: _Record, kind: Kind, *, by: str = "", is_fault: bool = True
    ) -> Refusing:
        size = record.refuses_above() if record.has_good else 0
        model, needs = kind.model and f" of {kind.model}", kind.needs and f" with {kind.needs}"
        of = f" of {kind.path}{model}{needs}" + (f" above {size} bytes" if 0 < size < _NO_OPINION else "")
        is_sure = record.refuses_above() != _NO_OPINION
        others = [each for name, each in self._records[kind].items() if name != unit]
        is_apart, chance = record.beside(others)
        return Refusing(
            unit,
            record.what,
            of,
            record.against,
            len(record.outcomes),
            is_sure=is_sure,
            is_apart=is_apart,
            is_fault=is_fault,
            by=by,
            arrived=self._arrived,
            is_far=is_apart and chance < _HARDLY,
        )

    def _published(self, found: Refusing) -> Refusing:
        """What is known now: requests are counted anew."""
        self._arrived = 0
        return found

    def _any_refuses(self) -> bool:
        return any(
            record.refuses_above() != _NO_OPINION
            for records in self._records.values()
            for record in records.values()
        )

    def _has_served(self, unit: str) -> bool:
        return any(unit in records and records[unit].has_good for records in self._records.values())

    def _record(self, unit: str, kind: Kind) -> _Record:
        records = self._records.get(kind)
        if records is None:
            if len(self._records) >= KINDS_MAX:
                self._records.pop(next(iter(self._records)))
            records = self._records[kind] = {}
        return records.get(unit) or records.setdefault(unit, _Record())

    def _forget(self) -> None:
        self.watching = False
        self._records.clear()
        self._own.clear()
        self._budgets.clear()


@dataclass(slots=True)
class _Own:
    """Requests that are at fault themselves: until when that is believed, and how often it was."""

    until: float = 0.0
    times: int = 0


class Kind(NamedTuple):
    """What a request asks for, as far as units may differ in it."""

    model: str
    path: str
    needs: str = ""


class Advice(Enum):
    """What to do with a doubtful answer."""

    SHOW = auto()
    ASK = auto()
    """Ask another unit, if one has room."""
    INSIST = auto()
    """The unit is known for it: the request goes to another one, and may wait for that."""
    HOLD = auto()
    """Others are asked about this unit already: keep the answer until one of them has said something."""


class Refusing(NamedTuple):
    """What is now known of a unit: it answers `what` to requests `of` a kind, `against` of `total` times. Not
    `is_sure`: so it seems, after a few. `is_apart`: doubtful answers are a larger share of its own than of
    others'; `is_far`: and chance hardly explains it. Not `is_fault`: units of a mixed fleet may say so. `by`
    is the unit that has served the last one, and so many requests have `arrived` since the last time.
    """

    unit: str
    what: str
    of: str
    against: int
    total: int
    is_sure: bool = True
    is_apart: bool = False
    is_fault: bool = True
    by: str = ""
    arrived: int = 0
    is_far: bool = False

    @property
    def reason(self) -> str:
        return f"refuses what other units serve{self.of}: {self.what} ({self.against} of {self.total})"


class _Record:
    """What became of requests of one kind at one unit: `outcomes` are (size, good?), the last at the end."""

    def __init__(self) -> None:
        self.outcomes: deque[tuple[int, bool]] = deque(maxlen=_OUTCOMES)
        self.pending: dict[str, int] = {}
        """Doubtful answers of which it is not known yet whose fault they are, by payer."""
        self.in_flight = self.settled = 0
        self.cost = 1.0
        """Of the last opinion about it."""
        self.doubted_at = -UNSURE_S
        self.unasked = 0
        """Doubtful answers about which nobody could be asked."""
        self.against_it = 1.0
        """The evidence that it refuses what others serve; 1: none."""
        self.total = self.bad = 0
        """Answers, and those of them that were doubtful."""
        self.own = 0
        """Doubtful ones besides, to requests that are known to be at fault themselves."""
        self.prompts: deque[int] = deque(maxlen=_PROMPTS)
        """Prompts whose answers count as a rate."""
        self.trial_at = 0.0
        self.what = ""

    def weigh(self, factor: float) -> None:
        """One more answer of it."""
        self.against_it = max(1.0, self.against_it * factor)

    def count(self, *, is_bad: bool) -> None:
        """One more answer; the old ones count less and less."""
        if self.total >= _COUNTED:
            self.total, self.bad, self.own = self.total // 2, self.bad // 2, self.own // 2
        self.total += 1
        self.bad += is_bad

    def beside(self, others: Collection[_Record]) -> tuple[bool, float]:
        """Whether it answers badly more often than others do, as far as anybody can see; and how likely
        equals differ so much by chance. What is known to be the request is left out, or else whoever sends
        such to all would hide what a unit does to others; with it the difference must be one that chance
        hardly explains.
        """
        total, bad, own = (sum(getattr(each, name) for each in others) for name in ("total", "bad", "own"))
        without = _compared(self.bad, self.total, bad, total)
        if without[1] < _HARDLY or not (self.own or own):
            return without
        counted = _compared(self.bad + self.own, self.total + self.own, bad + own, total + own)
        return counted if counted[1] < _HARDLY else without

    @property
    def is_awaited(self) -> bool:
        """Whether another unit is being asked about it."""
        return bool(self.pending)

    @property
    def has_good(self) -> bool:
        return any(good for _, good in self.outcomes)

    @property
    def against(self) -> int:
        return sum(not good for _, good in self.outcomes)

    def refuses_above(self) -> int:
        """The size of prompts above which it refuses what others serve; -1: all; a large number: none. It may
        serve what is shorter than all that it refused.
        """
        served = max((size for size, good in self.outcomes if good), default=-1)
        if served < 0:
            served = min((size for size, _ in self.outcomes), default=0) - 1
        above = sum(not good and size > served for size, good in self.outcomes)
        if above >= HANDFUL:
            return served
        return -1 if self.against_it >= _OPINION_SURE else _NO_OPINION


def _compared(mine: int, total: int, others_bad: int, others: int) -> tuple[bool, float]:
    """Whether a unit answers badly more often than others do, and by Fisher's test how likely equals differ
    so much by chance, if nobody chooses who is asked what.
    """
    if min(total, others) < _APART_MIN:
        is_apart = others > 0 and mine == total and not others_bad
    else:
        is_apart = mine / total >= others_bad / others + _APART
    if not is_apart:
        return False, 1.0
    return True, chance_of(mine, total, others_bad, others)


_NO_OPINION = 1 << 62
