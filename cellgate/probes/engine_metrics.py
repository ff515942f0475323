"""The engine's metrics: its load, and whether its step counters grow.

The page is scanned for the names needed (METRICS in engines.py), never fully parsed: one engine shows
thousands of lines. The epoch is the youngest process seen: several processes behind one address may answer in
turn, which is not a restart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

from cellgate.probes.base import REST_LONG_S, FetchError, PageGet, ProbeContext, Reply, is_in_use, rested_s
from cellgate.probes.engines import METRICS, MetricRole, any_of, engine
from cellgate.probes.sample_lines import SampleLines
from cellgate.router.nouns import Load, RankLoad, Verdict

_ABSENT = "absent"
"""Note: where the last replies held none of the names, and how many in a row they were."""
_ABSENT_LOOKS = 3
"""After this many in a row it is not a passing problem."""
_ASKED_NOTE = "asked"
"""Note: the URL that is being asked, and how many requests of this gate the unit had then."""
_LINES = "lines"
"""Note: which lines of the page are wanted."""
_EPOCH = "epoch"
"""Note: when the youngest process seen was born, as it was written."""

_ROOMY = 0.5
"""While less of a unit's KV cache is in use, it takes more than some seconds to be full."""
_LIMIT_BYTES = 4 << 20
_NUMBER_MAX = 2.0**53
"""Beyond it a float no longer counts in ones: no engine has so many requests, tokens or steps."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Asks every `period_s`; every `unknown_s` a suspect, whose canary may wait for requests of others; every
    `idle_s` a unit without work, which readiness looks at meanwhile, and one of a large fleet that works for
    this gate alone and shows that; every `absent_s` one that has shown no engine's numbers for some looks.

    A look that brings no reply is soon repeated: the next one may show the unit's next epoch.
    """

    name: ClassVar[str] = "engine_metrics"
    period_s: float = 1.0
    unknown_s: float = 0.5
    idle_s: float = 3.0
    absent_s: float = 30.0
    timeout_s: float = 2.0

    def limit_s(self, _context: ProbeContext) -> float:
        return self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Later for a unit without work, late for one that has no metrics where its engine shows them."""
        if _ABSENT in context.notes and (absences := _absences(context, _url(context))):
            return last_at + (self.absent_s if absences >= _ABSENT_LOOKS else self.period_s)
        if context.verdict is Verdict.SUSPECT:
            return last_at + self.unknown_s
        load = context.load
        if context.verdict is not Verdict.UP or load is None:
            return last_at + self.period_s
        if not is_in_use(context):
            return last_at + rested_s(context, context.fetch, last_at, self.idle_s, REST_LONG_S)
        return last_at + (self.idle_s if self._tells_little(context, load) else self.period_s)

    def _tells_little(self, context: ProbeContext, load: Load) -> bool:
        """Whether its answers show as much of it: all its work is known here, none waits, nothing is full."""
        return (
            context.is_of_many
            and context.now() - context.progress_at < self.period_s
            and not (load.foreign or load.waiting)
            and load.kv_use < _ROOMY
        )

    def page(self, context: ProbeContext) -> PageGet:
        """Where its engine shows its numbers."""
        url = _url(context)
        context.notes[_ASKED_NOTE] = url, context.in_flight
        is_own, server, path = _place(url, context.unit.url)
        return PageGet(
            context.fetch if is_own else context.net.fetch(server), path, self.timeout_s, _LIMIT_BYTES
        )

    def read(self, context: ProbeContext, answer: Reply | FetchError) -> tuple[Load, ...]:
        """The load, or nothing: absence of metrics says nothing about the unit."""
        if isinstance(answer, FetchError):
            return ()
        url, own_in_flight = context.notes[_ASKED_NOTE]
        # Requests that came during the fetch may be in its numbers, and are not work of others.
        own_in_flight, load = max(own_in_flight, context.in_flight), None
        if answer.status == 200:
            lines = context.notes.setdefault(_LINES, SampleLines(_SAMPLE))
            load = scan(answer.body, context.unit.name, context.now(), own_in_flight, lines)
        if load is None:
            context.notes[_ABSENT] = url, _absences(context, url) + 1
            return ()
        context.notes.pop(_ABSENT, None)
        youngest = _youngest(context, load.epoch)
        return (load if load.epoch == youngest else replace(load, epoch=youngest),)


def _absences(context: ProbeContext, url: str) -> int:
    """How many replies in a row held none of the names at `url`."""
    where, looks = context.notes.get(_ABSENT, ("", 0))
    return looks if where == url else 0


def _url(context: ProbeContext) -> str:
    """Where the unit's numbers are: as configured, or where its engine shows them."""
    unit, known = context.unit, engine(context.engine)
    if unit.metrics_url:
        return unit.metrics_url
    if known.metrics_port is None:
        return unit.url + known.metrics
    parts = urlsplit(unit.url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{known.metrics_port}{known.metrics}"


@lru_cache(16_384)
def _place(url: str, unit_url: str) -> tuple[bool, str, str]:
    """Whether `url` is on the unit's own server, its server, and its path."""
    parts = urlsplit(url)
    is_own = urlsplit(unit_url).netloc == parts.netloc
    return is_own, f"{parts.scheme}://{parts.netloc}", parts.path or "/metrics"


def _youngest(context: ProbeContext, born: str | None) -> str | None:
    """The latest start of a process seen so far, this one included."""
    known = context.notes.get(_EPOCH)
    if born is not None and (known is None or float(born) > float(known)):
        context.notes[_EPOCH] = known = born
    return known


def _pattern() -> tuple[
    re.Pattern[bytes], dict[bytes, MetricRole], dict[bytes, tuple[bytes, dict[bytes, MetricRole]]]
]:
    """The expression for a sample (name, labels, value), and the roles: by name, and by name and label."""
    roles: dict[bytes, MetricRole] = {}
    families: dict[bytes, tuple[bytes, dict[bytes, MetricRole]]] = {}
    for spec, role in METRICS.items():
        name, _, label = spec.encode().rstrip(b"}").partition(b"{")
        if not label:
            roles[name] = role
            # The colon after the prefix became an underscore in some of the releases.
            roles[name.replace(b":", b"_")] = role
        else:
            key, _, value = label.partition(b"=")
            families.setdefault(name, (key + b'="', {}))[1][value] = role
    names = any_of([*roles, *families])
    return re.compile(rb"\n(%b)(?:\{([^\n]*)\})? ([^ \n]+)" % names), roles, families


_SAMPLE, _ROLES, _FAMILIES = _pattern()
_SAME_WORK = re.compile(rb'(?:tp|pp|moe_ep|moe_tp)_rank="\d*"')
"""Labels of the ranks that compute the same requests together."""
_METRICS_BLOCKS = re.compile(rb'num_gpu_blocks="(\d{1,12})"')
_BLOCK_SIZE = re.compile(rb'block_size="(\d{1,6})"')
_METRICS_RANK = re.compile(rb'(?:engine|dp_rank)="(\d{1,4})"')
"""How vLLM and SGLang name a data parallel rank."""
_ADAPTERS = re.compile(rb'(?:running|waiting)_lora_adapters="([^"]*)"')
_ADAPTER_PLACES = re.compile(rb'max_lora="(\d{1,6})"')
_ADAPTERS_MAX = 256
"""So many adapters in use are looked at."""
_OF_RANKS = (MetricRole.RUNNING, MetricRole.WAITING, MetricRole.STEPS, MetricRole.PROGRESS)
_LABELS_KEPT = 512
"""What longer labels mean is not remembered: they come from a server."""

_Key = tuple[bytes, bytes]
_Samples = Mapping[_Key, float]
_NONE: _Samples = {}


class _Meaning(NamedTuple):
    """What a sample tells, by its name and labels; samples with the same key show the same. `tokens`: what
    it says in its labels and not in its value.
    """

    role: MetricRole
    key: _Key
    tokens: float | None = None


_ADDED_UP = [(role, role.value) for role in MetricRole if Load.__annotations__.get(role.value) == "float"]
"""Roles with the name of a number in Load: nothing else is to be said of them."""


def scan(
    body: bytes, unit: str, at: float, own_in_flight: int, lines: SampleLines | None = None
) -> Load | None:
    """The load in a text in Prometheus' format; None when it shows no engine. `lines`: what is known of this
    page.

    Engines behind one front end (data parallel ranks, models) are summed; of their KV cache use the fullest
    counts. Ranks that share their work show the same numbers, which count once.
    """
    samples: dict[MetricRole, dict[_Key, float]] = {}
    born: str | None = None
    for match in (lines or SampleLines(_SAMPLE)).of(body):
        name, labels, text = match.groups(b"")
        meaning = _meaning(name, labels) if len(labels) <= _LABELS_KEPT else _mean(name, labels)
        value = _number(text)
        if meaning is None or value is None:
            continue
        role, key, tokens = meaning
        if role is MetricRole.BORN:
            born = text.decode("ascii", "replace")
            continue
        if tokens is not None:
            value = tokens
        known = samples.get(role)
        if known is None:
            samples[role] = {key: value}
        elif key not in known or value > known[key]:
            known[key] = value
    running, waiting = samples.get(MetricRole.RUNNING, _NONE), samples.get(MetricRole.WAITING, _NONE)
    if not running and not waiting:
        return None
    adapters, adapter_places = _adapters(samples.get(MetricRole.ADAPTERS, _NONE))
    steps = samples.get(MetricRole.STEPS, _NONE)
    counters = [*steps.values(), *samples.get(MetricRole.PROGRESS, _NONE).values()]
    return Load(
        unit,
        at,
        running=_total(running),
        waiting=_total(waiting),
        kv_use=min(max(samples.get(MetricRole.KV_USE, _NONE).values(), default=0.0), 1.0),
        own_in_flight=own_in_flight,
        progress=sum(counters) if counters else None,
        sighted=bool(steps),
        epoch=born,
        kv_tokens=_total(samples.get(MetricRole.KV_TOKENS, _NONE)),
        adapters=adapters,
        adapter_places=adapter_places,
        ranks=_ranks(samples),
        **{name: sum(samples[role].values()) for role, name in _ADDED_UP if role in samples},
    )


def _ranks(samples: Mapping[MetricRole, _Samples]) -> tuple[RankLoad, ...]:
    """The data parallel ranks, if there are several and all are shown, as one is once it has served."""
    if len({labels for role in _OF_RANKS for _, labels in samples.get(role, _NONE)}) < 2:
        return ()
    found: dict[int, dict[MetricRole, float]] = {}
    for role in _OF_RANKS:
        for (_, labels), value in samples.get(role, _NONE).items():
            if rank := _METRICS_RANK.search(labels):
                sums = found.setdefault(int(rank[1]), {})
                sums[role] = sums.get(role, 0.0) + value
    if len(found) < 2 or max(found) >= len(found):
        return ()
    return tuple(
        RankLoad(
            number,
            _count(found[number].get(MetricRole.RUNNING, 0.0)),
            _count(found[number].get(MetricRole.WAITING, 0.0)),
            found[number].get(MetricRole.STEPS, 0.0) + found[number].get(MetricRole.PROGRESS, 0.0),
        )
        for number in range(len(found))
    )


def _adapters(samples: _Samples) -> tuple[frozenset[str], int]:
    """The LoRA adapters in use, and how many fit. vLLM keeps the series of earlier times: the last counts."""
    if not samples:
        return frozenset(), 0
    _, labels = max(samples, key=lambda key: samples[key])
    names = b",".join(_ADAPTERS.findall(labels)).split(b",")[:_ADAPTERS_MAX]
    places = _ADAPTER_PLACES.search(labels)
    return frozenset(name.decode("utf-8", "replace") for name in names if name), int(
        places[1]
    ) if places else 0


def _total(samples: _Samples) -> int:
    """Their sum, which is as bounded as each of them."""
    return _count(sum(samples.values()))


def _count(value: float) -> int:
    return int(min(value, _NUMBER_MAX))


def _mean(name: bytes, labels: bytes) -> _Meaning | None:
    role = _role(name, labels)
    if role is None:
        return None
    key = name, _SAME_WORK.sub(b"", labels) if b"_rank=" in labels else labels
    if role is MetricRole.KV_SHAPE:
        return _Meaning(MetricRole.KV_TOKENS, key, _tokens(labels))
    return _Meaning(role, key)


_meaning = lru_cache(16_384)(_mean)


def _role(name: bytes, labels: bytes) -> MetricRole | None:
    """What a sample tells, by its name and, in some families, by one of its labels."""
    if name in _ROLES:
        return _ROLES[name]
    label, roles = _FAMILIES[name]
    _, found, rest = labels.partition(label)
    return roles.get(rest.partition(b'"')[0]) if found else None


def _tokens(labels: bytes) -> float:
    """How many tokens blocks of a cache hold; 0 when it is not said."""
    blocks, size = _METRICS_BLOCKS.search(labels), _BLOCK_SIZE.search(labels)
    return float(int(blocks[1]) * int(size[1])) if blocks and size else 0.0


def _number(text: bytes) -> float | None:
    """A count or share; None for NaN, negatives, what is no number and what is too large to be one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= _NUMBER_MAX else None
