"""The canary: one token through what the unit really serves. The only probe that proves generation.

1. A canary that fails is BAD only when the unit had no excuse: busy is not sick, and a timeout during which
   anything moved on the unit, or it started anew, is neutral.
2. Its prompt is unique and shorter than a KV block, so that no cache can answer it; it carries no priority,
   because vLLM refuses one by default.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from probes.base import FetchError, Patient, Reply, Trouble
from probes.models import ask_models
from router.nouns import Evidence, Finding, Sign, Strength, Verdict

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_NOT_SERVED = frozenset({400, 404, 405, 422, 501})
_BUSY = frozenset({429, 503})
_EXCERPT = 160
_DOUBLINGS_MAX = 16

_PATH = "path"
"""Note: the path that the unit answered last."""
_TIMEOUTS = "timeouts"
"""Note: canaries that ran out of time in a row."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Asks for one token: each `period_s` while there is doubt, of an UP unit after a while without life."""

    name: ClassVar[str] = "canary"
    period_s: float = 1.0

    def limit_s(self, patient: Patient) -> float:
        """The longest timeout there is; the models may be asked for first."""
        return 2 * patient.rules.warm_up_timeout_s

    def due_at(self, patient: Patient, last_at: float) -> float:
        """The next period, but for an UP unit not before `canary_idle_s` after its last sign of life."""
        due = last_at + self.period_s
        if patient.verdict is Verdict.UP:
            return max(due, patient.life_at + patient.rules.canary_idle_s)
        return due

    def timeout_s(self, patient: Patient) -> float:
        """Short where users are served, long where the first request may have to warm the engine up.

        For a DOWN unit it doubles from one timeout to the next: it may need to warm up, or be gone again.
        """
        rules = patient.rules
        if patient.verdict in (Verdict.STARTING, Verdict.PROBATION):
            return rules.warm_up_timeout_s
        if patient.verdict is Verdict.DOWN:
            doublings: int = min(patient.notes.get(_TIMEOUTS, 0), _DOUBLINGS_MAX)
            return min(rules.warm_up_timeout_s, rules.canary_timeout_s * (1 << doublings))
        return rules.canary_timeout_s

    async def look(self, patient: Patient) -> AsyncGenerator[Finding, None]:
        """Evidence of one canary; before it the models, if nobody knew them."""
        life_at = patient.life_at
        timeout_s = self.timeout_s(patient)
        deadline = patient.now() + timeout_s
        timed_out = False
        try:
            model = _model(patient)
            if not model and (models := await ask_models(patient, timeout_s)):
                model = models.names[0]
                yield models
            path, reply = await _ask(patient, model, deadline)
        except FetchError as error:
            timed_out = error.trouble is Trouble.TIMEOUT
            # A unit that has started anew meanwhile may take longer than this canary has waited.
            excused = patient.life_at > life_at or self.timeout_s(patient) > timeout_s
            sign, strength = _weigh(error.trouble, excused=excused)
            reason = f"no token within {timeout_s:g} s: {error}" if timed_out else f"no token: {error}"
        else:
            sign, said = _read(reply)
            strength, reason = Strength.STRONG, f"POST {path}: {said}"
            if sign is Sign.GOOD:
                patient.notes[_PATH] = path
        patient.notes[_TIMEOUTS] = patient.notes.get(_TIMEOUTS, 0) + 1 if timed_out else 0
        yield Evidence(patient.unit.name, sign, strength, self.name, reason, patient.now())


def _model(patient: Patient) -> str:
    """The first model configured, or the first of those the unit told; empty when none is known."""
    return next(iter(patient.unit.models), "") or min(patient.models, default="")


async def _ask(patient: Patient, model: str, deadline: float) -> tuple[str, Reply]:
    """The first path that the unit serves, and its reply; the last one tried when it serves none."""
    request_id = f"cellgate-canary-{patient.new_id()}"
    known = patient.notes.get(_PATH)
    for path in sorted(_PATHS, key=lambda path: path != known):
        reply = await patient.fetch(
            "POST",
            path,
            body=_body(path, model, patient.new_id()),
            request_id=request_id,
            timeout_s=max(0.0, deadline - patient.now()),
        )
        if reply.status not in _NOT_SERVED:
            break
    return path, reply


def _body(path: str, model: str, prompt: str) -> bytes:
    """A request for one token. Without a known model the field is left out: engines then take their own."""
    body: dict[str, Any] = {"model": model} if model else {}
    if path == "/v1/embeddings":
        body["input"] = prompt
    elif path == "/v1/completions":
        body |= {"prompt": prompt, "max_tokens": 1}
    else:
        body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
    return orjson.dumps(body)


def _weigh(trouble: Trouble, *, excused: bool) -> tuple[Sign, Strength]:
    if trouble is Trouble.REFUSED:
        return Sign.BAD, Strength.FATAL
    if trouble is Trouble.OWN or (trouble is Trouble.TIMEOUT and excused):
        return Sign.NEUTRAL, Strength.WEAK
    return Sign.BAD, Strength.STRONG


def _read(reply: Reply) -> tuple[Sign, str]:
    """What a reply proves, and how to say it."""
    if reply.status == 200 and _has_answer(reply.body):
        return Sign.GOOD, "one token"
    said = f"HTTP {reply.status} {_excerpt(reply.body)}"
    if reply.status == 200:
        return Sign.BAD, f"no answer in {said}"
    if reply.status in _BUSY:
        return Sign.NEUTRAL, f"busy, {said}"
    if reply.status == 501 or reply.status < 500:
        # The front end answers these without its engine: neither life nor its absence is proven.
        return Sign.NEUTRAL, f"nothing proven by {said}"
    return Sign.BAD, said


def _has_answer(body: bytes) -> bool:
    """True for a JSON object with choices (or embeddings) in it and no error."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(parsed, dict) or parsed.get("error"):
        return False
    return any(isinstance(parsed.get(key), list) and parsed[key] for key in ("choices", "data"))


def _excerpt(body: bytes) -> str:
    """The beginning of a body, on one line, for a person to read."""
    return ascii(body[:_EXCERPT].decode("utf-8", "replace"))
