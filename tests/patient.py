"""A patient made of plain values, for looking at what one probe does with what a unit says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any, NamedTuple, cast

from cellgate.probes.base import (
    AsyncProbe,
    Fetch,
    FetchError,
    HttpPageProbe,
    Net,
    P,
    Probe,
    ProbeContext,
    Reply,
    Trouble,
)
from cellgate.router.nouns import Build, Evidence, Finding, Load, Node, Rules, Unit, Urgency, Use, Verdict

Answer = Reply | Trouble

_UNIT = Unit("u", "c", "http://u")
_RULES = Rules()


class Asked(NamedTuple):
    """One request that a probe has made."""

    method: str
    target: str
    body: bytes
    request_id: str
    timeout_s: float
    rank: int | None = None
    fresh: bool = False


def reply(status: int, body: bytes = b"") -> Reply:
    """A unit's answer."""
    return Reply(status, {}, body)


@dataclass
class FakePatient:
    """`answer` is called with each target. A trouble is raised, a timeout after it has taken its time.

    What goes to another server than the unit is asked for with the whole URL.
    """

    answer: Callable[[str], Answer]
    unit: Unit = _UNIT
    node: Node | None = None
    verdict: Verdict = Verdict.UP
    in_flight: int = 0
    rests: float = 1.0
    is_of_many: bool = False
    progress_at: float = 0.0
    answered_at: float = 0.0
    is_peers_turn: bool = False
    uses: Sequence[Use] = ()
    waiting: Use | None = None
    is_answering: bool = False
    load: Load | None = None
    ranks: int = 0
    stalled_rank: int | None = None
    stall_limit_s: float = 1.0
    held_down: bool = False
    is_on_hold: bool = False
    is_hiding: bool = False
    is_seen_still: bool = False
    borne_until: float = -inf
    borne_s: float = 0.0
    is_lucky: bool = False
    seats_shown: int = 0
    occupied: list[float] = field(default_factory=list)
    engine: str = ""
    restarted: tuple[str, float] | None = None
    build: Build = field(default_factory=Build)
    urgency: Urgency = Urgency.ROUTINE
    models: frozenset[str] = frozenset({"m"})
    rules: Rules = _RULES
    now_s: float = 100.0
    notes: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    heard_count: int = 0
    tokens: list[str] = field(default_factory=list)
    _ids: count[int] = field(default_factory=count)

    def now(self) -> float:
        return self.now_s

    async def pause(self, pause_s: float) -> None:
        self.now_s += pause_s

    def new_id(self) -> str:
        return f"id{next(self._ids)}"

    def hides_work(self, asked_at: float = 0.0) -> bool:
        return self.is_hiding

    def answered_beside(self, asked_at: float, late: int, waited_s: float) -> None:
        self.seats_shown = max(self.seats_shown, self.in_flight)

    def is_late_by_chance(self, late: int, *, is_young: bool, is_beside: bool) -> bool:
        return self.is_lucky

    def occupied_until(self, at: float) -> None:
        self.occupied.append(at)

    def received(self) -> None:
        self.heard_count += 1

    @property
    def is_calm(self) -> bool:
        return self.rests > 1.0

    def rest(self, at: float) -> float:
        return self.rests

    def asks(self, at: float) -> None:
        """Nothing keeps it."""

    def says_again(self, _said: Evidence) -> bool:
        return False

    def wake(self) -> None:
        self.rests = 1.0

    def takes_turn(self) -> Use | None:
        waiting, self.waiting = self.waiting, None
        return waiting

    def answers_since(self, since: float) -> bool:
        return self.is_answering

    @property
    def fetch(self) -> Fetch:
        return cast("Fetch", self._fetch)

    @property
    def net(self) -> Net:
        return _FakeNet(self)

    async def _fetch(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        request_id: str = "",
        rank: int | None = None,
        fresh: bool = False,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        self.asked.append(Asked(method, target, body, request_id, timeout_s, rank, fresh))
        answer = self.answer(target)
        if answer is Trouble.TIMEOUT:
            self.now_s += timeout_s
        if isinstance(answer, Trouble):
            raise FetchError(answer, f"{answer.value}, so it was said")
        if len(answer.body) > max_bytes:
            raise FetchError(Trouble.BROKEN, f"more than {max_bytes} bytes")
        return answer


class _FakeNet:
    """The fetch of its patient under other addresses; there is nothing to connect to."""

    def __init__(self, context: FakePatient) -> None:
        self._context = context

    def fetch(self, url: str, *, token: str = "") -> Fetch:
        self._context.tokens.append(token)

        async def fetch(method: str, target: str, **rest: Any) -> Reply:
            return await self._context.fetch(method, url + target, **rest)

        return cast("Fetch", fetch)

    async def connect(
        self, address: str, factory: Callable[[], P], *, timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        raise FetchError(Trouble.REFUSED, f"connection refused by {address}")

    def follow(self, address: str, *_: Any, **__: Any) -> AbstractAsyncContextManager[None]:
        raise FetchError(Trouble.REFUSED, f"connection refused by {address}")


async def findings_of(probe: Probe, context: ProbeContext) -> list[Finding]:
    """What one look finds."""
    if not isinstance(probe, HttpPageProbe):
        return [finding async for finding in cast("AsyncProbe", probe).look(context)]
    page = probe.page(context)
    answer: Reply | FetchError
    try:
        answer = await page.fetch("GET", page.target, timeout_s=page.timeout_s, max_bytes=page.max_bytes)
    except FetchError as error:
        answer = error
    findings = probe.read(context, answer)
    if isinstance(findings, AsyncGenerator):
        return [finding async for finding in findings]
    return [*findings]


def look(probe: Probe, context: FakePatient) -> list[Finding]:
    """The same without a loop, because no answer of the patient waits for anything."""
    looking = findings_of(probe, context)
    try:
        looking.send(None)
    except StopIteration as end:
        findings: list[Finding] = end.value
        return findings
    raise AssertionError("the look waits for something that is not the patient")


def evidence_of(probe: Probe, context: FakePatient) -> Evidence:
    """The same of a look that finds one piece of evidence and nothing else."""
    [evidence] = look(probe, context)
    assert isinstance(evidence, Evidence)
    return evidence
