"""Explains which unit a request gets and why: `/explain` on the admin port, and `x-cellgate-explain`.

It shows what the router uses (proxy/control/explain.py), and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from math import inf
from statistics import median
from typing import Any, NamedTuple

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.control.stored_responses import StoredResponses
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.models import ModelChoice
from cellgate.proxy.request.routes import NAME_CHARS, RoutingHeaders
from cellgate.router.backlog import Backlog
from cellgate.router.board import Board
from cellgate.router.cost import Cost, Expected, terms
from cellgate.router.learning import FIRST_BYTES_PER_TOKEN
from cellgate.router.nouns import Ask, Candidate, Refusal, Verdict
from cellgate.router.pick import Bounds, Router, adapter_s, find_candidates
from cellgate.router.prefill_decode import Weighed
from cellgate.router.queue import Entry, priorities
from cellgate.router.sampling import IDLE_S, LOOK_AT_ALL, SAMPLE
from cellgate.router.unit_state import Lease, UnitState

TOKENS_MAX = 100_000_000
WITHOUT_BODY = ("model", "prompt_tokens")
PARAMETERS = ("session", "tenant", "priority", "ttft_ms", "tried")

_EXPLAIN_REFUSED: dict[Refusal, str] = {
    Refusal.NO_UNIT: "503: no unit can take it; see the reason of each unit",
    Refusal.UNKNOWN_MODEL: "404: no unit here serves this model",
    Refusal.LATE: "429: it could not be answered before its deadline",
    Refusal.FULL: "429: it would have to wait, and the queue is full",
    Refusal.POISON: "502: units have died of its prompt",
    Refusal.HELD: "it waits until it is known whether its prompt ends units",
    Refusal.ON_HOLD: "it waits: the engines of the only units for it are paused, asleep or scaling",
    Refusal.STALLED: "it waits: the only units for it show nothing, and may go on with what they have",
    Refusal.UNSURE: "it waits for a canary: the only units for it may have restarted",
}
_WHY_NOT = {
    "drained": "an operator has drained it",
    "on_hold": "its engine is paused, asleep or scaling, or was, and a canary is sent",
    "starting": "its engine has not proven yet that it works",
    "down": "it is down",
    "probation": "it was down, and has to pass canaries first",
    "tried": "the request has failed there",
    "bound_elsewhere": "only another unit can answer this",
    "model": "it does not serve this model",
    "restart_suspected": "it may have restarted; a canary is sent",
    "full": "it is full, and others are not",
    "suspect": "it is suspect: it ranks after all others that have room",
    "cooling": "it has just answered with an error: others that have room come first",
    "slow_start": "it has just come up, and gets only a part of its share",
}


class RoutingExplain:
    """Explains what would happen to a request now. `now` is the gate's clock; `rng` replaces the gate's own
    random numbers; `payer` is who would pay for it.
    """

    def __init__(
        self,
        router: Router,
        stored: StoredResponses,
        headers: HeaderNames,
        policy: str,
        now: Callable[[], float],
        rng: random.Random,
        models: Callable[[], ModelChoice | None] = lambda: None,
        payer: str = "",
    ) -> None:
        self._models = models
        self._payer = payer
        self._router = router
        self._stored = stored
        self._routing_headers = RoutingHeaders(headers)
        # The parameters, by the request headers that they replace.
        self._lines = {
            "tenant": headers.tenant.encode(),
            "priority": headers.priority.encode(),
            "ttft_ms": b"x-slo-ttft-ms",
        }
        self._policy = policy
        self._now = now
        self._rng = rng

    def explain(self, query: Mapping[str, str], body: bytes | None = None) -> dict[str, Any] | Failure:
        """The answer of `/explain`, or what is wrong with its parameters; `body`: a request of a client."""
        known = PARAMETERS if body is not None else (*WITHOUT_BODY, *PARAMETERS)
        if (unknown := next((name for name in query if name not in known), None)) is not None:
            message = f"{unknown[:64]!r} is not a parameter; the parameters are: {', '.join(known)}"
            return Failure(FailureKind.BAD_REQUEST, message, param=unknown)
        ask = self._ask(query) if body is None else read_ask(body, _route_of(body))
        if isinstance(ask, Ask):
            lines = [(self._lines[name], query[name].encode()) for name in query if name in self._lines]
            ask = self._routing_headers.apply(ask, lines, self._now())
        if isinstance(ask, Ask):
            ask = ask._replace(session=query.get("session", ask.session)[:NAME_CHARS], payer=self._payer)
            ask = self._named(ask)
            ask = self._stored.bind(ask) or self._stored.unknown(ask)
        if isinstance(ask, Failure):
            return ask
        tried = [name for name in query.get("tried", "").split(",") if name]
        found = dry_run(self._router, ask, self._now(), self._rng, tried=tried, size=len(body or b""))
        return {
            "policy": self._policy,
            **_outcome(found),
            "notes": self._notes(found),
            "ask": _asked(ask),
            "queue": self._queue(ask.model),
            "units": [self._unit(unit_cost) for unit_cost in found.units],
        }

    def _named(self, ask: Ask) -> Ask:
        """The ask with the model that serves the name it has. Without a session it is one of several."""
        choice = self._models()
        if choice is None or ask.model is None:
            return ask
        return ask._replace(model=choice.served(ask.model, ask.session))

    def _ask(self, query: Mapping[str, str]) -> Ask | Failure:
        """A request without text: nothing of it can be cached."""
        text = query.get("prompt_tokens", "0")
        if not (text.isascii() and text.isdigit() and int(text) <= TOKENS_MAX):
            message = f"prompt_tokens: expected an integer from 0 to {TOKENS_MAX}, found {text[:64]!r}"
            return Failure(FailureKind.BAD_REQUEST, message, param="prompt_tokens")
        learnt = [state.costs.rates.bytes_per_token.value for state in self._router.board]
        size = int(int(text) * (median(learnt) if learnt else FIRST_BYTES_PER_TOKEN))
        return Ask(query.get("model"), stream=True, prompt_tokens=int(text), prompt_bytes=size)

    def _queue(self, model: str | None) -> dict[str, Any]:
        queue, rules = self._router.queue, self._router.queue.rules
        return {
            "waiting": len(queue),
            "waiting_max": rules.limit,
            "moved": queue.moved_count,
            "tokens": queue.tokens,
            "bytes": sum(entry.size for entry in queue.entries()),
            "bytes_max": rules.limit_bytes,
            "tenants": len({entry.tenant for entry in queue.entries()}),
            "drain_s": _seconds(self._router.drain_s(model)),
            "tokens_s": round(self._router.board.tokens_s(self._router.board.pools.of(model))),
        }

    def _unit(self, unit_cost: UnitCost) -> dict[str, Any]:
        state, now, board = unit_cost.unit_state, self._now(), self._router.board
        costs = state.costs
        return {
            "unit": state.unit.name,
            "cell": state.unit.cell,
            "candidate": not unit_cost.why_not,
            "why_not": f"{unit_cost.why_not}: {_WHY_NOT[unit_cost.why_not]}" if unit_cost.why_not else None,
            "has_room": unit_cost.has_room,
            "cost": {name: _seconds(value) for name, value in unit_cost.cost._asdict().items()},
            "adapter_s": _seconds(unit_cost.adapter_s),
            "split": _split(unit_cost.weighed),
            "prompt_tokens": round(unit_cost.prompt_tokens),
            "cached_tokens": round(unit_cost.cached_tokens),
            "cached_by": "events" if costs.known is not None and costs.known.is_used() else "belief",
            "guessed": costs.guessed(),
            "in_flight": state.in_flight,
            "places": int(min(state.learnt_limit, state.unit.max_in_flight)),
            "backlog_s": _seconds(costs.backlog_s(now)),
            "share": round(state.share(now, board.rules), 3),
        }

    def _notes(self, found: DryRun) -> list[str]:
        """Notes on what else may influence the choice."""
        if not self._router.policy.by_seconds:
            return ["this policy does not rank by costs; they are shown for information only"]
        notes, now = [], self._now()
        if (count := len(self._router.board.units)) > LOOK_AT_ALL:
            notes.append(
                f"of {count} units, {SAMPLE} random ones are considered for each request, and the one that "
                "got the beginning of its prompt last"
            )
        idle = [
            unit_cost.unit_state.unit.name
            for unit_cost in found.units[1:]
            if unit_cost.has_room
            and not unit_cost.why_not
            and now - unit_cost.unit_state.last_lease_at > IDLE_S
        ]
        if idle:
            more = f" and {len(idle) - 5} more" if len(idle) > 5 else ""
            notes.append(
                f"{', '.join(idle[:5])}{more} got no requests for {IDLE_S:.0f} s or longer: now and then "
                "such a unit gets a request, so that its speed is known"
            )
        return notes


def header_line(lease: Lease, waited_s: float) -> bytes:
    """`x-cellgate-explain` for the attempt of a lease that has just been opened."""
    words = [f"unit={lease.unit}"]
    words += [f"{name}={value:.4f}" for name, value in cost_of(lease)._asdict().items()]
    words += [f"prompt_tokens={lease.job.prompt_tokens}", f"cached_tokens={lease.job.cached_tokens}"]
    return f"x-cellgate-explain: {' '.join(words)} waited_s={waited_s:.4f}\r\n".encode()


def _outcome(found: DryRun) -> dict[str, Any]:
    if found.refusal is None:
        return {"decision": "sent", "unit": found.best, "reason": f"unit {found.best} ranks first"}
    if found.wait_s is None:
        return {"decision": "refused", "unit": None, "reason": _EXPLAIN_REFUSED[found.refusal]}
    if found.refusal in (Refusal.UNSURE, Refusal.ON_HOLD, Refusal.STALLED):
        return {"decision": "waits", "unit": None, "reason": _EXPLAIN_REFUSED[found.refusal]}
    first = next(unit_cost for unit_cost in found.units if unit_cost.unit_state.unit.name == found.best)
    reason = (
        "other requests wait, and it is queued behind them"
        if first.has_room
        else f"unit {found.best} ranks first and has no room"
        if any(unit_cost.has_room and not unit_cost.why_not for unit_cost in found.units)
        else "no unit has room"
    )
    return {"decision": "waits", "unit": found.best, "reason": reason, "wait_s": _seconds(found.wait_s)}


def _asked(ask: Ask) -> dict[str, Any]:
    return {
        "model": ask.model,
        "prompt_bytes": ask.prompt_bytes,
        "prefix_blocks": len(ask.blocks),
        "session": ask.session,
        "tenant": ask.tenant,
        "priority": ask.priority,
        "bound_to": ask.unit,
    }


def _route_of(body: bytes) -> str:
    """The path that such a body is most likely for."""
    return "chat" if b'"messages"' in body else "completions"


def _split(weighed: Weighed | None) -> dict[str, Any] | None:
    """Both legs, in seconds; None: no other unit could compute the prompt."""
    if weighed is None or weighed.split_s is None:
        return None
    found = weighed._asdict()
    return {name: _seconds(value) if name.endswith("_s") else value for name, value in found.items()}


def _seconds(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return round(value, 4) if value < 1e9 else None


# A dry run of an ask: what would happen now, and the state of each unit for it. Pure.
#
# It follows the steps of `Router.pick` and `Router.wait` without side effects: no lease, no turn of a policy,
# no place in the queue. Random choices (ties, slow start) use the caller's generator. It covers all units,
# also where the router would sample some, and never explores.


class UnitCost(NamedTuple):
    """One unit, and the cost of the ask there. `why_not` is empty for a candidate, else the reason.

    `adapter_s` is what loading its LoRA adapter costs, on top of `cost`.
    """

    unit_state: UnitState
    cost: Cost
    adapter_s: float
    prompt_tokens: float
    cached_tokens: float
    has_room: bool
    why_not: str
    weighed: Weighed | None = None
    """Of a candidate: what it costs if another unit computes the prompt."""


class DryRun(NamedTuple):
    """`best` is the candidate that ranks first, if there is one. `refusal` is None when it would get the ask;
    `wait_s` None when the ask would not wait, else for how long, as far as can be foreseen.

    `looks` are all units: candidates in their rank, then the others.
    """

    best: str | None
    refusal: Refusal | None
    wait_s: float | None
    units: list[UnitCost]


def dry_run(
    router: Router, ask: Ask, now: float, rng: random.Random, *, tried: Collection[str] = (), size: int = 0
) -> DryRun:
    """The result for a new ask with a body of `size` bytes, or for one that has failed on `tried`."""
    board, policy = router.board, deepcopy(router.policy)
    rules = router.queue.rules
    bounds = Bounds(rules.backlog_s, by_seconds=policy.by_seconds, by_cache=policy.by_cache)
    found = find_candidates(board, ask, now, tried, bounds, chance=rng.random())
    rows, refusal = found.rows, found.refusal
    unit_costs = _unit_costs(board, ask, now, tried, bounds, rows, found.expected)
    if not rows:
        if ask.model is not None and refusal is Refusal.NO_UNIT and board.knows_model(ask.model) is False:
            refusal = Refusal.UNKNOWN_MODEL
        waits = refusal in (Refusal.UNSURE, Refusal.ON_HOLD, Refusal.STALLED)
        return DryRun(None, refusal, 0.0 if waits else None, list(unit_costs.values()))
    if not policy.by_seconds:
        rows = [row for row in rows if row.has_room] or rows
    ranked = [row.unit for row in policy.rank(ask, rows, rng)]
    order = [unit_costs.pop(name) for name in ranked] + list(unit_costs.values())
    timely = [unit_cost for unit_cost in order[: len(ranked)] if not _is_late(unit_cost, ask, now)]
    if not timely:
        return DryRun(ranked[0], Refusal.LATE, None, order)
    best = timely[0]
    if best.has_room and (tried or not router.comes_after(ask)):
        return DryRun(best.unit_state.unit.name, None, None, order)
    return DryRun(best.unit_state.unit.name, *_waits(router, ask, now, best, size), order)


def cost_of(lease: Lease) -> Cost:
    """The predicted cost of a lease; must be called as soon as it was opened."""
    costs, job, now = lease.unit_state.costs, lease.job, lease.opened_at
    backlog, before = costs.backlog, Backlog()
    if backlog.queued > 1:
        before.front_tokens, before.front_since = backlog.front_tokens, backlog.front_since
    before.queued_tokens = backlog.queued_tokens - job.uncached_tokens
    before.batch = backlog.batch - 1
    before.kv_tokens = backlog.kv_tokens - job.kv_tokens
    expected = Expected(job.answer_tokens, job.shared_blocks, job.charged)
    spared = costs.spared_tokens(job.cached_blocks, expected)
    return Cost(
        *terms(
            *(costs.cost_terms, before, job.prompt_tokens, job.cached_tokens, spared, job.answer_tokens, now)
        )
    )


def _is_late(unit_cost: UnitCost, ask: Ask, now: float) -> bool:
    return ask.deadline_at < inf and unit_cost.unit_state.costs.is_too_slow(ask, unit_cost.cost.ttft_s, now)


def _unit_costs(
    board: Board,
    ask: Ask,
    now: float,
    tried: Collection[str],
    bounds: Bounds,
    rows: list[Candidate],
    expected: Expected,
) -> dict[str, UnitCost]:
    candidates = {row.unit: row for row in rows}
    unit_costs = {}
    for name, state in board.units.items():
        held = board.held(state, ask.blocks) if bounds.by_cache else 0
        estimate, row = state.costs.estimate(ask, held, expected, now), candidates.get(name)
        is_free = state.unit.role == "prefill" or state.costs.backlog_s(now) <= bounds.backlog_s
        has_room = state.has_room(now, 0.0) and is_free
        why_not = "" if row is not None else _why_not(state, ask, now, tried)
        unit_costs[name] = UnitCost(
            state,
            Cost(*estimate.terms),
            adapter_s(state, ask, expected),
            estimate.prompt_tokens,
            estimate.cached_tokens,
            has_room,
            why_not,
            _weigh(board, ask, row, estimate.terms[0], expected, now) if row is not None else None,
        )
    return unit_costs


def _weigh(
    board: Board, ask: Ask, row: Candidate, whole_s: float, expected: Expected, now: float
) -> Weighed | None:
    if not board.pairs.prefillers:
        return None
    # A row that would be split has that price already.
    whole = row._replace(cost_s=whole_s)
    return board.pairs.weigh(ask, whole, board.units[row.unit], expected, now)


def _why_not(state: UnitState, ask: Ask, now: float, tried: Collection[str]) -> str:
    """Why a unit is no candidate; the last four are, when no other has room."""
    if state.drained:
        return "drained"
    if state.hold is not None:
        return "on_hold"
    if not state.is_usable():
        return state.case.verdict.value
    if state.unit.name in tried:
        return "tried"
    if ask.unit is not None and ask.unit != state.unit.name:
        return "bound_elsewhere"
    if not state.serves(ask):
        return "model"
    if state.is_restart_suspected():
        return "restart_suspected"
    if not state.has_room(now, 0.0):
        return "full"
    if state.case.verdict is Verdict.SUSPECT:
        return "suspect"
    return "cooling" if state.cool_until > now else "slow_start"


def _waits(router: Router, ask: Ask, now: float, best: UnitCost, size: int) -> tuple[Refusal, float | None]:
    """Whether the queue would take it, and for how long."""
    pool = router.board.pools.of(ask.model)
    fair, rules, tokens_s = (
        router.queue.pool(pool).fair_queue,
        router.queue.rules,
        router.board.tokens_s(pool),
    )
    tokens = max(int(best.prompt_tokens - best.cached_tokens), 1)
    own, priority = priorities(ask.payer, ask.priority)
    expires_at = min(now + rules.max_wait_s, ask.deadline_at)
    entry: Entry[None] = Entry(
        None,
        ask.tenant,
        priority,
        tokens,
        size,
        now,
        expires_at,
        None,
        (own, rules.due_at(tokens, now), 1 << 62),
        ask.payer,
        ask.session,
    )
    wait_s = fair.wait_s(entry, tokens_s)  # type: ignore[arg-type]
    if now + wait_s > expires_at and router.board.is_sure_of(pool):
        return Refusal.LATE, None
    # In a full queue it may still displace the last ask of a tenant with more than its share.
    is_full = len(fair) >= rules.limit or fair.size + size > rules.limit_bytes
    return Refusal.FULL, None if is_full or wait_s == inf else wait_s
