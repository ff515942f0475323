"""Wrong answers: whose answer to one fixed greedy prompt is wrong, and who only differs. Pure.

The units compared have the same cell, model and build, so that greedy decoding gives all the same answer,
up to rounding: a log probability may differ by the tolerance, and another token counts only where the first
one was so far ahead of it that rounding cannot explain it. Rules:
1. A unit differs when it does not say what most units say, and it says something else than before, or than
   another unit. One answer that differs proves nothing; several in a row do.
2. It seems wrong when a majority of the units have answered since, and agree with each other.
3. Without such a majority it seems wrong when it says something else than before in this epoch while another
unit, asked since, does not; and when no other unit of the records is out for its answers.
4. Where neither holds, nobody can tell who is right, and all stay. So a minority is out at most.
5. When most units say something new, that is right: weights were updated, or a template has the date in
it.
6. A unit that says now this, now that, and comes back by itself, is no measure of others: where kernels are
not deterministic, units do not agree with themselves.
7. All that only raises the question: units whose answers differ by the same chance do so in a row as well.
What decides is an exact test of more answers, in pairs (router/equals.py, answer_pairs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple

from cellgate.router.known_answers import STRIKES, STRIKES_OF_TEXT, AnswerRecord, AnswerTokens, is_same
from cellgate.router.nouns import Answered

WAVERS_S = 3600.0
"""For so long a unit that has said now this, now that is no measure."""
Records = Mapping[str, AnswerRecord]
"""The units that are compared, by name; those that are out for their answers are among them."""


def why_wrong(name: str, records: Records, out: Collection[str]) -> Doubted | None:
    """Why the answers of a unit seem wrong; None: there is no reason. `out`: units out for theirs."""
    record = records[name]
    if not record.is_confirmed:
        return None
    fresh = {
        unit: peer
        for unit, peer in records.items()
        if unit != name and unit not in out and peer.at >= record.differs_since
    }
    wavering = {unit for unit, peer in fresh.items() if peer.at - peer.wavered_at < WAVERS_S}
    fresh = {unit: peer for unit, peer in fresh.items() if unit not in wavering}
    for peer in fresh.values():
        alike = _alike(peer, fresh)
        # Text alone must be the same everywhere else.
        is_enough = record.needed == STRIKES or len(alike) == len(fresh)
        if is_enough and _is_majority(alike, records) and not is_same(peer.latest, record.latest):
            reason = f"{', '.join(sorted(alike))} agree on another answer"
            return Doubted(reason, peer.latest, dict.fromkeys(alike, peer.latest))
    if out or wavering or not record.first or is_same(record.first, record.latest):
        return None
    moved = {unit for unit, peer in fresh.items() if not is_same(peer.first, peer.latest)}
    steady = {unit for unit, peer in fresh.items() if peer.first_at < record.differs_since} - moved
    if not steady or len(moved) >= len(steady):
        return None
    reason = f"it answered otherwise before in this epoch, and {', '.join(sorted(steady))} did not change"
    return Doubted(reason, record.first, {unit: records[unit].first for unit in steady})


class Doubted(NamedTuple):
    """That the answers of a unit are wrong: why it seems so, what it is `expected` to say, and what its
    `peers` are, that are its measure.
    """

    reason: str
    expected: AnswerTokens
    peers: Mapping[str, AnswerTokens]


def is_right(name: str, records: Records, out: Collection[str]) -> bool:
    """Whether a unit that is out for its answers has given a right one."""
    record = records[name]
    if _is_majority(_alike(record, records), records):
        return True
    peers = {unit: peer for unit, peer in records.items() if unit != name and unit not in out}
    if any(_is_majority(_alike(peer, peers), records) for peer in peers.values()):
        return False
    known = [record.first, *(peer.latest for peer in peers.values())]
    return any(is_same(answer, record.latest) for answer in known)


def first_record(answered: Answered) -> AnswerRecord:
    """The record of a unit with its first answer."""
    return AnswerRecord(answered.question, answered.tokens, answered.at, answered.tokens, answered.at)


def recorded(records: Records, answered: Answered) -> AnswerRecord:
    """The record of a unit with one more answer; `records` has the records so far."""
    old, tokens, at = records.get(answered.unit), answered.tokens, answered.at
    if old is None or old.question != answered.question:
        old = first_record(answered)
    has_come_back = not is_same(old.first, old.latest) and is_same(old.first, tokens)
    agrees_with_itself = is_same(old.latest, tokens)
    record = old._replace(latest=tokens, at=at)
    records = {**records, answered.unit: record}
    alike = _alike(record, records)
    has_moved = not is_same(record.first, tokens)
    if has_come_back and record.differing < record.needed:
        record = record._replace(wavered_at=at)
    if _is_majority(alike, records):
        record = record._replace(first=tokens, first_at=at) if has_moved else record
        return record._replace(differing=0, differs_since=inf)
    if not has_moved and len(alike) == len(records):
        return record._replace(differing=0, differs_since=inf)
    if record.needed == STRIKES_OF_TEXT and record.differing and not agrees_with_itself:
        # Asked twice, it says this and that.
        return record._replace(differing=1, differs_since=at)
    return record._replace(differing=record.differing + 1, differs_since=min(record.differs_since, at))


def outvoted(name: str, records: Records) -> dict[str, AnswerRecord]:
    """The records of units whose last answer turns out to differ, because most units agree with `name`, which
    has just answered. Such a unit may have been the first to answer.
    """
    agree = _alike(records[name], records)
    if not _is_majority(agree, records):
        return {}
    return {
        unit: record._replace(differing=1, differs_since=record.at)
        for unit, record in records.items()
        if unit not in agree and not record.differing
    }


def doubted(record: AnswerRecord, at: float) -> AnswerRecord:
    """The record of a unit whose engine reports corrupted requests: as if an answer had differed."""
    return record._replace(differing=max(1, record.differing), differs_since=min(record.differs_since, at))


def no_measure(record: AnswerRecord, at: float) -> AnswerRecord:
    """The record of a unit that says now this, now that, as others do."""
    return record._replace(differing=0, differs_since=inf, wavered_at=at)


def condemned(record: AnswerRecord) -> AnswerRecord:
    """The record of a unit that was found wrong: an answer that was wrong from the start is no reference."""
    return record._replace(first=()) if is_same(record.first, record.latest) else record


def alike(name: str, records: Records) -> set[str]:
    """The units whose last answer is that of `name`, with it."""
    return _alike(records[name], records) | {name}


def _alike(record: AnswerRecord, records: Records) -> set[str]:
    tokens = record.latest
    if not tokens:
        return {unit for unit, peer in records.items() if peer is record}
    return {
        unit
        for unit, peer in records.items()
        # Most say the very same, which needs no look at each token.
        if peer is record or tokens == peer.latest is not tokens or is_same(peer.latest, tokens)
    }


def _is_majority(units: Collection[str], records: Records) -> bool:
    return len(units) >= 2 and 2 * len(units) > len(records)
