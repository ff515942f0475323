"""Explains which unit a request gets and why: `/explain` on the admin port, and `x-cellgate-explain`.

It shows what the router uses (router/dry_run.py), and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.control.plane import StoredResponses
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.models import ModelChoice
from cellgate.proxy.request.routes import RoutingHeaders
from cellgate.router.dry_run import DryRun, UnitCost, cost_of, dry_run
from cellgate.router.learning import FIRST_BYTES_PER_TOKEN
from cellgate.router.nouns import Ask, Refusal
from cellgate.router.pick import IDLE_S, LOOK_AT_ALL, SAMPLE, Router
from cellgate.router.prefill_decode import Weighed
from cellgate.router.unit_state import Lease

TOKENS_MAX = 100_000_000
WITHOUT_BODY = ("model", "prompt_tokens")
PARAMETERS = ("session", "tenant", "priority", "ttft_ms", "tried")

_REFUSED: dict[Refusal, str] = {
    Refusal.NO_UNIT: "503: no unit can take it; see the reason of each unit",
    Refusal.UNKNOWN_MODEL: "404: no unit here serves this model",
    Refusal.LATE: "429: it could not be answered before its deadline",
    Refusal.FULL: "429: it would have to wait, and the queue is full",
    Refusal.POISON: "502: units have died of its prompt",
    Refusal.HELD: "it waits until it is known whether its prompt ends units",
    Refusal.ON_HOLD: "it waits: the engines of the only units for it are paused, asleep or scaling",
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
    random numbers.
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
    ) -> None:
        self._models = models
        self._router = router
        self._stored = stored
        self._routing_headers = RoutingHeaders(headers)
        # The parameters, by the request headers that they replace.
        self._lines = {
            "session": headers.session.encode(),
            "tenant": headers.tenant.encode(),
            "priority": headers.priority.encode(),
            "ttft_ms": b"x-slo-ttft-ms",
        }
        self._policy = policy
        self._now = now
        self._rng = rng

    def explain(self, query: Mapping[str, str], body: bytes | None = None) -> dict[str, Any] | Failure:
        """The answer of `/explain`, or what is wrong with its parameters; `body` is a request as clients send
        it.
        """
        known = PARAMETERS if body is not None else (*WITHOUT_BODY, *PARAMETERS)
        if (unknown := next((name for name in query if name not in known), None)) is not None:
            message = f"{unknown[:64]!r} is not a parameter; the parameters are: {', '.join(known)}"
            return Failure(FailureKind.BAD_REQUEST, message, param=unknown)
        ask = self._ask(query) if body is None else read_ask(body, _route_of(body))
        if isinstance(ask, Ask):
            lines = [(self._lines[name], query[name].encode()) for name in query if name in self._lines]
            ask = self._routing_headers.apply(ask, lines, self._now())
        if isinstance(ask, Ask):
            ask = self._stored.bind(self._named(ask))
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
        return {"decision": "refused", "unit": None, "reason": _REFUSED[found.refusal]}
    if found.refusal in (Refusal.UNSURE, Refusal.ON_HOLD):
        return {"decision": "waits", "unit": None, "reason": _REFUSED[found.refusal]}
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
