"""Helpers: what the gate needs beside its units, and whether each works now. The one place that knows.

Redis, the guardrail, collectors, the file of keys, sources of units, certificates, and the configuration as
it was last read. Each says its own trouble when it is asked; a change is one event, and what lasts is shown.

In this order: `Helpers`, `HelperTrouble`, `CountedHelper`, `counted_helpers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from prometheus_client import Metric

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.observe.counters import EXPORTS, GUARDRAIL, JWKS, TALLIES, TallyKey
from cellgate.proxy.observe.events import Action, ActionKind, EventLog
from cellgate.proxy.observe.families import gauge
from cellgate.proxy.observe.text import one_line

HELPER_LOOK_S = 1.0


class Helpers:
    """All helpers of one gate. `now` is the loop's time."""

    def __init__(self, events: EventLog, now: Callable[[], float]) -> None:
        self._events = events
        self._now = now
        self._asks: list[Question] = []
        self._works: dict[str, bool] = {}
        self._known: dict[str, _Known] = {}
        self._look_at = 0.0

    def watch(self, ask: Question) -> None:
        """Ask these as well, from now on."""
        self._asks.append(ask)

    def tick(self, now: float) -> None:
        """Ask all of them, once a second."""
        if now >= self._look_at:
            self._look_at = now + HELPER_LOOK_S
            self.look()

    def look(self) -> None:
        """Ask all of them now."""
        now = self._now()
        found = {name: trouble for ask in self._asks for name, trouble in ask().items()}
        self._works = {name: trouble is None or trouble.weight == "soon" for name, trouble in found.items()}
        for name in [name for name in self._known if found.get(name) is None]:
            known = self._known.pop(name)
            if name in found and not known.trouble.has_event:
                passed = f"after {now - known.since:.0f} s"
                self._events.add(Action("helper_back", "gate", detail=f"{name}, {passed}"))
        for name, trouble in found.items():
            if trouble is not None:
                self._note(name, trouble._replace(says=one_line(trouble.says)), now)

    def _note(self, name: str, trouble: HelperTrouble, now: float) -> None:
        known = self._known.get(name)
        if known is not None and known.trouble.weight == trouble.weight:
            known.trouble = trouble
            return
        self._known[name] = _Known(trouble, now)
        if not trouble.has_event:
            self._events.add(Action(_EVENTS[trouble.weight], "gate", detail=f"{name}: {trouble.says}"))

    def shown(self) -> list[dict[str, Any]]:
        """What is wrong now, the worst first, ready for JSON."""
        now = self._now()
        rows = sorted(
            self._known.items(), key=lambda row: (_HELPER_ORDER[row[1].trouble.weight], row[1].since)
        )
        return [
            {
                "helper": name,
                "weight": known.trouble.weight,
                "says": known.trouble.says,
                "since_s": round(now - known.since, 1),
            }
            for name, known in rows
        ]

    def collect(self) -> Iterator[Metric]:
        text = "1 while a helper of the gate works, 0 while it fails; /status says why."
        yield gauge("helper_up", text, "helper", self._works.items())


Weight = Literal["soon", "lost", "grave"]
"""It will fail, it fails, or clients are refused because of it."""


class HelperTrouble(NamedTuple):
    """What is wrong with a helper, what the gate does without it, and what an operator can do: one line.

    `has_event`: the helper itself has said it as an event.
    """

    says: str
    weight: Weight = "lost"
    has_event: bool = False


Question = Callable[[], Mapping[str, HelperTrouble | None]]
"""By name of helper its trouble; None: it works."""

_HELPER_ORDER = {"grave": 0, "lost": 1, "soon": 2}
_EVENTS: dict[Weight, ActionKind] = {"soon": "helper_ages", "lost": "helper_lost", "grave": "helper_lost"}


@dataclass(slots=True)
class _Known:
    trouble: HelperTrouble
    since: float


LAST_WORDS: dict[str, str] = {}
"""Why the last call of a helper failed, by its name; those that are here have their event from this process,
and log nothing themselves.
"""


class CountedHelper:
    """A helper whose calls are counted (proxy/observe/counters.py), in any process of the gate: it fails
    while calls fail and none succeeds.

    Of its `calls`, the results (the last label) in `good` are successes, those in `bad` failures; others say
    nothing of it. `of_workers` are counts of workers; `says` is its trouble, with the `{why}` of failures,
    and `weight` how bad that is.
    """

    def __init__(
        self,
        name: str,
        calls: TallyKey,
        good: frozenset[str],
        bad: frozenset[str],
        says: str,
        of_workers: Mapping[TallyKey, int],
        weight: Weight = "lost",
    ) -> None:
        self._name = name
        self._calls = calls
        self._good = good
        self._bad = bad
        self._says = says
        self._weight: Weight = weight
        self._of_workers = of_workers
        self._seen: dict[TallyKey, int] = {}
        self._trouble: HelperTrouble | None = None

    def ask(self) -> Mapping[str, HelperTrouble | None]:
        """Its trouble, by what was counted since the last call."""
        grown = set()
        for key in {*TALLIES, *self._of_workers}:
            if key[: len(self._calls)] == self._calls:
                count = TALLIES[key] + self._of_workers.get(key, 0)
                if count > self._seen.get(key, 0):
                    grown.add(key[-1])
                self._seen[key] = count
        if grown & self._good:
            self._trouble = None
        elif failed := grown & self._bad:
            why = LAST_WORDS.get(self._name) or ", ".join(sorted(failed))
            self._trouble = HelperTrouble(self._says.format(why=why), self._weight)
        return {self._name: self._trouble}


def counted_helpers(settings: Settings, of_workers: Mapping[TallyKey, int]) -> Iterator[CountedHelper]:
    make = partial(CountedHelper, of_workers=of_workers)
    if (guardrail := settings.guardrail) is not None:
        follows = "requests pass unseen" if guardrail.fail == "open" else "requests get 503"
        says = f"{guardrail.url} gives no verdict ({{why}}): {follows} (guardrail.fail: {guardrail.fail})"
        weight: Weight = "lost" if guardrail.fail == "open" else "grave"
        yield make("guardrail", (GUARDRAIL,), _VERDICTS, _NO_VERDICT, says, weight=weight)
    says = "{} does not accept {} ({{why}}): they are dropped until it does; requests are not affected"
    sent, dropped = frozenset({"sent"}), frozenset({"dropped"})
    if (tracing := settings.tracing) is not None:
        LAST_WORDS["tracing"] = ""
        spans = says.format(tracing.endpoint, "spans")
        yield make("tracing", (EXPORTS, "spans"), sent, dropped, spans)
    if (endpoint := settings.otlp_metrics) is not None:
        LAST_WORDS["otlp_metrics"] = ""
        metrics = says.format(endpoint, "metrics")
        yield make("otlp_metrics", (EXPORTS, "metrics"), sent, dropped, metrics)
    if settings.keys is not None and (jwt := settings.keys.jwt) is not None:
        says = f"{jwt.jwks_url} gives no set of keys; the old ones hold, and without any each token gets 401"
        fetched, failed = frozenset({"fetched"}), frozenset({"failed"})
        yield make("JSON Web Tokens", (JWKS,), fetched, failed, says)


_VERDICTS = frozenset({"allowed", "denied", "changed"})
_NO_VERDICT = frozenset({"timeout", "unreachable", "nonsense"})
