"""What the admin port shows of the fleet and of each unit. Pure.

In this order: `Moment`, `remarks`, `links_of`, `status`, `what_comes`, `explain`, `unit_page`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from cellgate import VERSION
from cellgate.probes.fault_status import rank_words
from cellgate.proxy.ingress.reasons import (
    NOTHING_YET,
    Rotation,
    advice,
    before_a_token,
    present_reason,
    rotation_of,
    shortcomings,
    standing_since,
    unseen_nodes,
    why,
)
from cellgate.proxy.observe.text import duration
from cellgate.router.board import RESTART_SUSPECTED_S, Board
from cellgate.router.cost_model import CostModel
from cellgate.router.departures import is_draining
from cellgate.router.health import is_on, shared_fates, spoken, stall_limit_s
from cellgate.router.known_answers import ANSWER_FAULT, KNOWN_RETRY_S, AnswerRecord
from cellgate.router.nouns import AGENT, PANIC_MAX_S, Case, Evidence, Hold, Load, Rules, Sign, Verdict
from cellgate.router.opinions import KNOWN_S, REFUSING_SOURCE
from cellgate.router.prefill_decode import TransferLink
from cellgate.router.unit_state import SLOW_START_LEAST, UnitState


def unit_view(state: UnitState, now: float) -> dict[str, Any]:
    """The unit ready for JSON; ages in seconds before `now`."""
    unit = state.unit
    return {
        "name": unit.name,
        "cell": unit.cell,
        "url": unit.url,
        "verdict": state.case.verdict.value,
        "usable": state.is_usable(),
        "drained": state.drained,
        "draining": is_draining(state),
        "hold": _hold(state.hold, now),
        "restart_suspected": state.is_restart_suspected(),
        "degraded": round(state.outlier.degraded, 3),
        "odd_answers": state.has_odd_answers(),
        "build": build_view(state),
        "since_s": _age(state.case.since, now),
        "standing_s": _age(standing_since(state), now),
        "reason": why(state),
        "evidence": [_evidence(e, now) for e in _behind(state.case)],
        "in_flight": state.in_flight,
        "max_in_flight": unit.max_in_flight,
        "weight": state.weight,
        "load": _load(state.load, now) if state.load is not None else None,
        "routing": _routing(state.costs, now),
        "models": sorted(state.models),
        "role": unit.role,
        "nodes": [{"name": node.name, "role": node.role.value} for node in unit.nodes],
    }


@dataclass(frozen=True, slots=True)
class Moment:
    """The time at which a unit is shown, with facts that the Board does not have.

    `canary_s` is within what time its next canary begins (0: it is in flight; None: none is planned),
    `panic_at` since when the gate is in panic (None: it is not).
    """

    now: float
    rules: Rules
    panic_at: float | None = None
    canary_s: float | None = None

    def ago(self, at: float) -> str:
        """How long ago something was, for a person to read."""
        seconds = max(0.0, self.now - at)
        return f"{seconds:.1f} s" if seconds < 60.0 else duration(seconds)


def is_held(state: UnitState, board: Board, now: float) -> bool:
    """Whether a unit is in rotation only because of panic."""
    return board.panic_at is not None and state.is_usable() and state.is_unreachable(now)


def silent_s(state: UnitState, now: float) -> float | None:
    """For how long a unit with requests has stalled; None when it has none."""
    return now - state.quiet_since if state.leases else None


def remarks(state: UnitState) -> list[str]:
    """What else an operator should know of a unit, one line each; none for an ordinary one."""
    lines = []
    if state.other_builds:
        others = ", ".join(state.other_builds)
        lines.append(f"Its build, {state.build.key}, is another one than that of {others}.")
    lines += [f"Its engine says: {rank_words(fault)}." for fault in state.facts.faults]
    if state.facts.odd:
        lines.append(f"Its software differs from that of its cell: it has {state.facts.odd}.")
    if state.has_odd_answers() and state.answers is not None:
        lines.append(f"Its last {state.answers.differing} answers to the known prompt differ.")
    return lines


def build_view(state: UnitState) -> dict[str, Any]:
    """Its build for JSON; empty where unknown."""
    fingerprint, version, _ = state.build
    return {"fingerprint": fingerprint, "version": version, "other_builds": list(state.other_builds)}


def answer_view(record: AnswerRecord | None, now: float) -> dict[str, Any] | None:
    """Its last answer to the known prompt for JSON; null: none yet."""
    if record is None:
        return None
    return {
        "question": record.question,
        "text": "".join(token.token for token in record.latest),
        "age_s": round(now - record.at, 3),
        "differing": record.differing,
    }


def links_of(board: Board, unit: str, now: float) -> list[dict[str, Any]]:
    """The links of one unit, ready for JSON."""
    return [_view(*pair, link, now) for pair, link in sorted(board.pairs.links.items()) if unit in pair]


def avoided(board: Board, unit: str, now: float) -> list[str]:
    """The links of one unit that are avoided because transfers failed, a line each."""
    return [
        f"The link from {pair[0]} to {pair[1]} is avoided: transfers failed."
        for pair, link in sorted(board.pairs.links.items())
        if unit in pair and _is_avoided(link, now)
    ]


def _is_avoided(link: TransferLink, now: float) -> bool:
    """A link that was never used is closed as well while its first transfer is under way."""
    return link.failures > 0 and not link.is_open(now)


def _explained(prefiller: str, decoder: str, link: TransferLink, now: float) -> list[str]:
    """Why requests are, or are not, split between two units; each item is one line."""
    lines = [_pair_line(prefiller, decoder, link, now)]
    if link.last_failure:
        lines.append(f"Last failure: {link.last_failure} ({now - link.last_failure_at:.0f} s ago).")
    lines.append(f"{link.transferred} transfers arrived, {link.failed} failed.")
    if link.seen:
        lines.append(f"Its speed is {link.tokens_s:.0f} tokens of KV cache a second, as measured.")
    return lines


def _pair_line(prefiller: str, decoder: str, link: TransferLink, now: float) -> str:
    if link.is_open(now):
        return f"Requests may be split between {prefiller} and {decoder}."
    return (
        f"The pair of {prefiller} and {decoder} is avoided for {link.avoided_until - now:.1f} s more, after "
        f"{link.failures} failures in a row; then one request tries it."
    )


def _view(prefiller: str, decoder: str, link: TransferLink, now: float) -> dict[str, Any]:
    return {
        "prefiller": prefiller,
        "decoder": decoder,
        "open": link.is_open(now),
        "avoided": _is_avoided(link, now),
        "failures": link.failures,
        "last_failure": link.last_failure,
        "transferred": link.transferred,
        "failed": link.failed,
        "tokens_s": round(link.tokens_s) if link.seen else None,
        "why": _explained(prefiller, decoder, link, now),
    }


# A summary of the fleet for the status page and `cellgate top`, created for each request. Pure.


MISSING_SHOWN = 4
MODELS_SHOWN = 8
"""A unit may list hundreds of adapters; /units/NAME has all."""


def status(
    board: Board, now: float, *, waiting: int, stopping: bool, roll: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The gate and all its units, ready for JSON. `waiting` requests have no unit yet; `roll` is the one
    under way, or the last one.
    """
    moment = Moment(now, board.rules, board.panic_at)
    return {
        "version": VERSION,
        "ready": not stopping and any(state.is_usable() for state in board),
        "stopping": stopping,
        "panic": board.panic_at is not None,
        "waiting": waiting,
        "in_flight": board.in_flight,
        "roll": roll,
        "units": [_row(state, moment, avoided(board, state.unit.name, now)) for state in board],
    }


def reduced(models: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The models that have fewer units than within the last hour, or miss some: a line of reasons each."""
    return [
        {
            "name": each["name"],
            "units": each["units"],
            "most_last_hour": each["most_last_hour"],
            "missing": [f"{one['unit']}: {one['cause']}" for one in each["missing"][:MISSING_SHOWN]],
        }
        for each in models
        if each["missing"] or each["units"] < each["most_last_hour"]
    ][:MODELS_SHOWN]


def load_s(state: UnitState, now: float) -> float:
    """How long the prompts at the unit will take to compute, as the router estimates."""
    cost_terms = state.costs.cost_terms
    tokens = state.costs.backlog.backlog_tokens(now, cost_terms.tokens_s) + cost_terms.foreign_tokens
    return tokens / cost_terms.tokens_s


def _row(state: UnitState, moment: Moment, avoided_links: list[str]) -> dict[str, Any]:
    unit, load, rotation = state.unit, state.load, rotation_of(state, moment.now, moment.panic_at)
    besides = ", ".join(each.word for each in shortcomings(state))
    is_well = rotation is Rotation.IN and not besides
    return {
        "name": unit.name,
        "cell": unit.cell,
        "role": unit.role,
        "verdict": state.case.verdict.value,
        "standing": rotation.value,
        "besides": besides,
        "usable": state.is_usable(),
        "drained": state.drained,
        "hold": None if state.hold is None else state.hold.kind.value,
        "degraded": round(state.outlier.degraded, 3),
        "odd_answers": state.has_odd_answers(),
        "remarks": [*remarks(state), *avoided_links],
        "since_s": round(moment.now - standing_since(state), 1),
        "reason": why(state),
        "advice": "" if is_well else next(advice(state, rotation), ""),
        "in_flight": state.in_flight,
        "max_in_flight": unit.max_in_flight,
        "load_s": round(load_s(state, moment.now), 3),
        "kv_use": None if load is None else round(load.kv_use, 3),
        "load_age_s": None if load is None else round(moment.now - load.at, 1),
        "models": sorted(state.models)[:MODELS_SHOWN],
        "nodes": _nodes(state),
    }


def _nodes(state: UnitState) -> list[dict[str, str]]:
    """`state`: bad when any source reports so, unseen when no source has evidence of the node."""
    faulty = {node for node, _ in state.case.faults}
    unseen, good, bad = unseen_nodes(state), set(), {}
    for (node, _), word in state.last_evidence.items():
        if word.sign is Sign.GOOD:
            good.add(node)
        elif word.sign is Sign.BAD:
            bad[node] = word.reason
    return [
        {
            "name": node.name,
            "role": node.role.value,
            "state": "bad"
            if node.name in faulty or node.name in bad
            else "good"
            if node.name in good
            else "unseen",
            "reason": bad.get(node.name) or (unseen[node.name].reason if node.name in unseen else ""),
        }
        for node in state.unit.nodes
    ]


# What comes next for a unit, and when; and what an operator can do. One line each. Pure.


_WHAT_FOLLOWS: dict[Rotation, str] = {
    Rotation.DRAINED: "nothing, until an operator undrains it (cellgate undrain {unit}).",
    Rotation.ON_HOLD: "when its engine goes on, a canary (a request for one token) is sent; when it passes, "
    "the unit gets requests. In {hold_left} at the latest it is judged again, whatever its engine says.",
    Rotation.HELD: "units are judged one by one again when they answer, in {panic_left} at the latest.",
    Rotation.RESTART_SUSPECTED: "{canary}. Any progress of the unit ends the suspicion of a restart, and "
    "so do {suspicion_left} without another cut.",
    Rotation.SUSPECT: "{canary}. If it passes, the unit is up; if the unit fails it, it is down.",
    Rotation.FULL: "new requests go there as others end.",
    Rotation.IN: "{canary}, unless the unit shows work before that.",
    Rotation.STARTING: "{canary}. It must pass; {then}",
    Rotation.DOWN: "{canary}. {passes} must pass in a row; {then}",
    Rotation.DRAINING: "its requests end there; {canary}. {passes} must pass in a row; {then}",
    Rotation.PROBATION: "{canary}. {passed} of {passes} have passed; {then}",
}
_WHAT_FOLLOWS_ANSWERS = (
    "it gets the known prompt every {known_s:g} s; when its answer is right, a canary is sent."
)
_WHAT_FOLLOWS_REFUSED = "it gets plain requests every second; when it answers as others do, a canary is sent."
_WHAT_FOLLOWS_FAULTS = "it stays out until {faults} reports no fault; then a canary is sent at once."


def what_comes(state: UnitState, rotation: Rotation, moment: Moment) -> str:
    """What happens next, and when, without an operator."""
    rules, faults = moment.rules, sorted(state.case.faults)
    is_held_down = faults and state.hold is None and not state.drained and not state.is_usable()
    panic_s = moment.now - moment.panic_at if moment.panic_at is not None else 0.0
    words = _WHAT_FOLLOWS[rotation] if not is_held_down else _WHAT_FOLLOWS_FAULTS
    if is_held_down and faults == [ANSWER_FAULT]:
        words = _WHAT_FOLLOWS_ANSWERS
    elif is_held_down and {source for _, source in faults} == {REFUSING_SOURCE}:
        words = _WHAT_FOLLOWS_REFUSED
    return words.format(
        unit=state.unit.name,
        canary=_canary(moment),
        passes=rules.passes,
        passed=state.case.passes,
        then=_then(rules),
        hold_left=f"{_hold_left_s(state, moment):.0f} s",
        faults=" and ".join(f"{source} of node {node}" if node else source for node, source in faults),
        known_s=KNOWN_RETRY_S,
        panic_left=f"{max(0.0, PANIC_MAX_S - panic_s):.1f} s",
        suspicion_left=f"{max(0.0, state.restart_suspected_at + RESTART_SUSPECTED_S - moment.now):.1f} s",
    )


def _canary(moment: Moment) -> str:
    if moment.canary_s is None:
        return "no canary (a request for one token) is planned"
    when = f"within {moment.canary_s:.1f} s" if moment.canary_s else "is in flight"
    return f"a canary (a request for one token) {when}"


def _hold_left_s(state: UnitState, moment: Moment) -> float:
    """How long its engine is believed."""
    since = state.hold.since if state.hold is not None else moment.now
    return max(0.0, since + moment.rules.hold_limit_s - moment.now)


def _then(rules: Rules) -> str:
    if not rules.slow_start_s:
        return "then it gets requests."
    least, after_s = f"{SLOW_START_LEAST:.0%}", rules.slow_start_s
    return f"then it gets requests, one at a time or {least} of its share at first, all after {after_s:g} s."


# Explains the state of one unit to operators. Pure.
#
# Is it in or out of rotation, since when, on what evidence, what comes next and what can be done.
# Nothing is decided here: the Board has the state of a unit, router/judge.py what follows from evidence.


QUIET_S = 0.25
"""A shorter stall is not mentioned."""
MODELS_SHOWN_S = 3600.0
"""So long a change of its models is shown."""

_HEADLINES: dict[Rotation, str] = {
    Rotation.DRAINED: "{unit} is out of rotation: an operator drained it. {requests} are still in flight. "
    "Its verdict is {verdict}, for {time}.",
    Rotation.ON_HOLD: "{unit} is out of rotation: {hold}, for {held}. {requests} are still in flight. "
    "Its verdict is {verdict}, for {time}; it is not judged, and not recovered, while its engine says so.",
    Rotation.HELD: "{unit} is kept in rotation, although it has not answered for {mute}: most units "
    "do not answer, so this gate assumes that its own network is cut off.",
    Rotation.RESTART_SUSPECTED: "{unit} gets no requests for now: it closed a connection unexpectedly "
    "{cut} ago, and may have restarted.",
    Rotation.SUSPECT: "{unit} is suspect, for {time}: {because} It gets requests only when no other unit "
    "has room.",
    Rotation.FULL: "{unit} is in rotation, but full: {requests} are in flight.",
    Rotation.IN: "{unit} is in rotation, for {time}{but}.",
    Rotation.STARTING: "{unit} is starting, for {time}: {because}",
    Rotation.DOWN: "{unit} is down, for {time}: {because}",
    Rotation.DRAINING: "{unit} takes no new requests, for {time}, and goes on with those that it has "
    "({requests}): {because}",
    Rotation.PROBATION: "{unit} is still out of rotation: it was down, and has answered again for {time}.",
}
_NAMES_CAUSE = (Rotation.SUSPECT, Rotation.STARTING, Rotation.DOWN, Rotation.DRAINING)
"""What needs no line more."""
_WHAT_FOLLOWS_SOURCES = {"request": "requests of clients", "progress": "the gate's own view of its progress"}


def explain(state: UnitState, moment: Moment) -> list[str]:
    """The explanation, the most important first; each item is one line."""
    rotation = rotation_of(state, moment.now, moment.panic_at)
    return [
        _headline(state, rotation, moment),
        *([] if rotation in _NAMES_CAUSE else [f"Because: {_because(state, moment)}"]),
        *_faults(state),
        *_besides(state, rotation, moment),
        *_received(state, moment),
        f"Next: {what_comes(state, rotation, moment)}",
        *(f"You can {words}" for words in advice(state, rotation)),
    ]


def _headline(state: UnitState, rotation: Rotation, moment: Moment) -> str:
    return _HEADLINES[rotation].format(
        unit=state.unit.name,
        but=f", but {words}" if (words := "; ".join(each.sentence for each in shortcomings(state))) else "",
        because=_because(state, moment),
        verdict=state.case.verdict.value,
        time=moment.ago(state.case.since),
        requests=_requests(state),
        hold=spoken(state.hold) if state.hold is not None else "",
        held=moment.ago(state.hold.since) if state.hold is not None else "",
        mute=moment.ago(max(state.answered_at, state.progress_at)),
        cut=moment.ago(state.restart_suspected_at),
    )


def _because(state: UnitState, moment: Moment) -> str:
    because = present_reason(state)
    if because is None:
        return f"{NOTHING_YET}."
    return before_a_token(state, because) + _said(because, state, moment)


def _faults(state: UnitState) -> list[str]:
    """Faults that stand until their source takes them back."""
    lines = []
    for node, source in sorted(state.case.faults):
        last = state.last_evidence.get((node or None, source))
        if last is None or last is not present_reason(state):
            said = f": {last.reason}" if last is not None else ""
            lines.append(f"Open fault: {_source(node or None, source)}{said}.")
    return lines


def _besides(state: UnitState, rotation: Rotation, moment: Moment) -> list[str]:
    """Other facts about its present state."""
    lines, rules, now = [], moment.rules, moment.now
    if rotation in (Rotation.IN, Rotation.SUSPECT):
        lines.append(f"{_requests(state)} are in flight.")
    if rotation is Rotation.DRAINED and state.hold is not None:
        lines.append(f"Besides, {spoken(state.hold)}, for {moment.ago(state.hold.since)}.")
    quiet_s = silent_s(state, now)
    if quiet_s is not None and quiet_s >= QUIET_S and not is_on(state.hold):
        limit_s = stall_limit_s(state, rules)
        lines.append(f"Stalled for {quiet_s:.1f} s; with its present work up to {limit_s:.1f} s are normal.")
    if degraded := state.outlier.degraded:
        lines.append(f"Its share of requests is {degraded:.0%} smaller, as it is slow.")
    lines += remarks(state)
    lines += [
        f"It {reason}, {moment.ago(at)} ago; others get these."
        for reason, at in state.refusals.values()
        if now - at < KNOWN_S
    ]
    words, at = state.models_said
    if words and now - at < MODELS_SHOWN_S:
        lines.append(f"It {words} ({moment.ago(at)} ago).")
    risen_s = now - state.up_since
    if state.is_usable() and risen_s < rules.slow_start_s:
        share, left_s = max(SLOW_START_LEAST, risen_s / rules.slow_start_s), rules.slow_start_s - risen_s
        lines.append(f"Slow start: it gets {share:.0%} of its share now, all of it in {left_s:.1f} s.")
    if rotation is Rotation.IN and state.cool_until > now:
        left_s = state.cool_until - now
        lines.append(f"It has just answered with an error: other units come first for {left_s:.1f} s more.")
    return lines


def _received(state: UnitState, moment: Moment) -> list[str]:
    """The last evidence of every source: bad or neutral in full, good in one line."""
    case, news = state.case, sorted(state.last_evidence.values(), key=_at, reverse=True)
    faults = ((node or None, source) for node, source in case.faults)
    reported = [case.because, present_reason(state), *map(state.last_evidence.get, faults)]
    lines = [
        f"{'Also bad' if word.sign is Sign.BAD else 'No evidence'}: {_said(word, state, moment)}"
        for word in news
        if word.sign is not Sign.GOOD and word not in reported and not _is_over(word, case)
    ]
    good = [w for w in news if w.sign is Sign.GOOD]
    if good:
        each = (f"{_source(w.node, w.source)} ({_good_since(w, state, moment)})" for w in good)
        lines.append(f"Last good evidence: {', '.join(each)}.")
    return lines


def _is_over(word: Evidence, case: Case) -> bool:
    """Evidence from before a unit came up is obsolete; that of a node is valid until the next.

    A reading of the epoch alone is neither good nor bad.
    """
    if word.epoch is not None and word.sign is Sign.NEUTRAL:
        return True
    return word.node is None and case.verdict in (Verdict.UP, Verdict.STARTING) and word.at < case.since


def _at(evidence: Evidence) -> float:
    return evidence.at


def _said(evidence: Evidence, state: UnitState, moment: Moment) -> str:
    who = _source(evidence.node, evidence.source)
    return f"{evidence.reason} ({who}, {_when(evidence, state, moment)})."


def _when(evidence: Evidence, state: UnitState, moment: Moment) -> str:
    restarted = state.case.restarted
    old = ", before its restart" if restarted is not None and evidence.at < restarted[1] else ""
    return f"{moment.ago(evidence.at)} ago{old}"


def _good_since(evidence: Evidence, state: UnitState, moment: Moment) -> str:
    """An agent sends its beats all the time, and evidence when something has changed."""
    if evidence.source == AGENT:
        return f"for {moment.ago(evidence.at)}"
    return _when(evidence, state, moment)


def _source(node: str | None, source: str) -> str:
    return f"{source} of node {node}" if node is not None else _WHAT_FOLLOWS_SOURCES.get(source, source)


def _requests(state: UnitState) -> str:
    return f"{state.in_flight} of {state.unit.max_in_flight} requests"


# A unit as the admin port shows it: its verdict, the evidence behind it, and its load. Pure.
#
# `unit_view` is for the list of all units; `unit_page` has all details of one.


EVIDENCE_SHOWN = 5


def unit_page(state: UnitState, board: Board, now: float, canary_s: float | None) -> dict[str, Any]:
    """`unit_view`, why it is so, and what comes next; `canary_s` as in `Moment`."""
    rules, case, quiet_s = board.rules, state.case, silent_s(state, now)
    page = unit_view(state, now)
    page["nodes"] = [node | {"news": _news(state, node["name"], now)} for node in page["nodes"]]
    return page | {
        "why": [*explain(state, Moment(now, rules, board.panic_at, canary_s)), *_shared(state, board)],
        "held_by_panic": is_held(state, board, now),
        "share": round(state.share(now, rules), 3),
        "faults": [{"node": node or None, "source": source} for node, source in sorted(case.faults)],
        "news": _news(state, None, now),
        "rank_findings": [*map(rank_words, state.facts.faults), *state.facts.ranks],
        "stacks": {name: dict(facts.stack) for name, facts in state.facts.nodes.items()},
        "engine": state.engine,
        "ranks": [
            {
                "rank": number,
                "in_flight": rank.in_flight,
                "running": rank.load.running,
                "waiting": rank.load.waiting,
            }
            for number, rank in enumerate(state.ranks.ranks[: state.ranks.count])
        ],
        "adapters": {"bases": dict(state.adapters.bases), "loaded": state.adapters.loaded()},
        "links": links_of(board, state.unit.name, now),
        "known_answer": answer_view(state.answers, now),
        "epochs": dict(case.epochs),
        "silent_s": None if quiet_s is None else round(quiet_s, 3),
        "silent_limit_s": round(stall_limit_s(state, rules), 3),
        "next_canary_s": None if canary_s is None else round(canary_s, 3),
    }


def _shared(state: UnitState, board: Board) -> list[str]:
    """What all failing units share, for one of them."""
    return [
        common_cause.in_words()
        for common_cause in shared_fates(board)
        if state.unit.name in common_cause.units
    ]


def _news(state: UnitState, of_node: str | None, now: float) -> dict[str, dict[str, Any]]:
    """The last evidence of each source about a node, or about the unit as a whole (None)."""
    return {
        source: {"sign": word.sign.value, "reason": word.reason, "age_s": _age(word.at, now)}
        for (node, source), word in state.last_evidence.items()
        if node == of_node
    }


def _behind(case: Case) -> list[Evidence]:
    """The last few pieces, newest first; the one that decided the verdict is always among them."""
    last = list(reversed(case.window[-EVIDENCE_SHOWN:]))
    return (
        last if case.because is None or case.because in last else [*last[: EVIDENCE_SHOWN - 1], case.because]
    )


def _hold(hold: Hold | None, now: float) -> dict[str, Any] | None:
    if hold is None:
        return None
    return {"kind": hold.kind.value, "since_s": _age(hold.since, now), "ended": bool(hold.ended_at)}


def _evidence(evidence: Evidence, now: float) -> dict[str, Any]:
    return {
        "sign": evidence.sign.value,
        "strength": evidence.strength.name.lower(),
        "source": evidence.source,
        "node": evidence.node,
        "reason": evidence.reason,
        "age_s": _age(evidence.at, now),
    }


def _load(load: Load, now: float) -> dict[str, Any]:
    return {
        "running": load.running,
        "waiting": load.waiting,
        "kv_use": round(load.kv_use, 4),
        "age_s": _age(load.at, now),
    }


def _routing(costs: CostModel, now: float) -> dict[str, Any]:
    """What the router uses: measured rates, this gate's backlog there, prompts in the prefix cache."""
    rates, work, prefixes = costs.rates, costs.backlog, costs.prefixes
    return {
        "prefill_tokens_s": round(rates.prefill_tokens_s.value, 1),
        "latency_s": round(rates.latency.without_work_s(rates.prefill_tokens_s.value), 4),
        "prefill_samples": rates.prefill_tokens_s.seen,
        "step_s": round(rates.steps.at(work.batch), 5),
        "bytes_per_token": round(rates.bytes_per_token.value, 3),
        "seats": int(costs.slots.limit) if costs.slots.limit < inf else None,
        "kv_tokens": costs.kv_tokens,
        "queued_tokens": work.queued_tokens,
        "backlog_s": round(costs.backlog_s(now), 3),
        "prefix_blocks": len(prefixes),
        "prefix_blocks_max": prefixes.limit,
        "prefix_trust": round(prefixes.trust, 3),
        "error_share": round(costs.errors.share(now), 3),
    }


def _age(at: float, now: float) -> float:
    return round(now - at, 3)
