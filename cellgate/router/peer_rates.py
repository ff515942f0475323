"""What stands for rates that were not measured: those of a unit's peers, and what weights say. Pure.

Rules:
1. A weight says what a unit can do beside others: usually how many times as fast it is. It stands for
   measurements until there are some, and no longer: it may be wrong, and a measured difference must not count
   twice.
2. Where weights do not fit what was measured of some units, they are not believed of the others either.
3. What is usual for a unit is what peers of its weight have; and where weights do not fit, all peers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import log, sqrt
from statistics import median
from typing import NamedTuple, TypeVar

from cellgate.router.latency import Latency
from cellgate.router.rates import PLAIN_ALIKE, SPEED_BATCH, Estimate, Rates, Steps, reckon

FADE_S = 300.0
"""What was confirmed so long ago counts half."""

_NOTHING = 1e-9
"""What sums of floats may differ by."""
LEAST = 1e-6
"""A unit is taken to be at least so many times as fast as the fastest."""

_Rate = TypeVar("_Rate", Estimate, Latency, Steps)


class Peer(NamedTuple):
    """A unit, as others see it. Those of one kind serve the same, and are configured alike."""

    kind: Hashable
    weight: float
    rates: Rates


_Fast = tuple[float, Rates]
"""How many times as fast as the fastest a unit is taken to be, as long as nothing is known."""


def learn_of_peers(units: Sequence[Peer], elapsed_s: float) -> None:
    """Have units guess what units of their kind have seen, or all; and what they saw themselves fade a
    little.
    """
    keep = 0.5 ** (elapsed_s / FADE_S)
    most = max((unit.weight for unit in units), default=1.0)
    kinds: dict[Hashable, list[_Fast]] = {}
    for kind, weight, rates in units:
        kinds.setdefault(kind, []).append((max(weight / most, LEAST), rates))
        for estimate in (rates.prefill_tokens_s, rates.bytes_per_token, rates.steps):
            estimate.fade(keep)
    everyone = [unit for kind in kinds.values() for unit in kind]
    for units_of_kind in kinds.values():
        if weights_fit(units_of_kind):
            weights: dict[float, list[_Fast]] = {}
            for unit in units_of_kind:
                weights.setdefault(unit[0], []).append(unit)
            for peers in weights.values():
                _guess(peers, units_of_kind, everyone)
        else:
            peers = [(1.0, rates) for _, rates in units_of_kind]
            _guess(peers, everyone)


def weights_fit(units: Sequence[tuple[float, Rates]]) -> bool:
    """Whether measured speeds differ as weights do: they scatter no more around what weights say than around
    each other.
    """
    if all(weight == units[0][0] for weight, _ in units):
        return True
    prefill = [(w, rates.prefill_tokens_s.value) for w, rates in units if rates.prefill_tokens_s.seen]
    decoding = [(w, 1.0 / rates.steps.at(SPEED_BATCH)) for w, rates in units if rates.steps.seen]
    plain = [(w, rates.plain_tokens_s.value) for w, rates in units if rates.plain_tokens_s.seen]
    known = [
        [(log(weight), log(speed)) for weight, speed in each] for each in (prefill, decoding, plain) if each
    ]
    weighed = sum(_scatter([speed - weight for weight, speed in each]) for each in known)
    return weighed <= sum(_scatter([speed for _, speed in each]) for each in known) + _NOTHING


def _scatter(values: Sequence[float]) -> float:
    usual = median(values)
    return sum(abs(value - usual) for value in values)


def _middle(values: Sequence[float]) -> float:
    """The median; of two in the middle their geometric mean, which is as far from one as from the other."""
    ordered = sorted(values)
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return sqrt(below * above) if below != above else below


def _guess(peers: Sequence[_Fast], *others: Sequence[_Fast]) -> None:
    """Set what is usual for each of `peers`, and what stands for its rates until there are some: what these
    have seen, or else the first of `others` that have seen any. All of them contain those before them.
    """
    groups = [peers]
    for some in others:
        if len(some) > len(groups[-1]):
            groups.append(some)

    def usual(of: Callable[[Rates], _Rate], value: Callable[[_Rate], float], power: int = 0) -> float | None:
        """The median, as if all were as fast as the fastest."""
        for some in groups:
            if seen := [(times, of(rates)) for times, rates in some if of(rates).seen]:
                return _middle([value(one) / times**power for times, one in seen])
        return None

    tokens_s = usual(lambda rates: rates.prefill_tokens_s, lambda rate: rate.value, 1)
    base_s = usual(lambda rates: rates.steps, lambda steps: steps.base_s, -1)
    plain_tokens_s = usual(lambda rates: rates.plain_tokens_s, lambda rate: rate.value, 1)
    step_share = usual(lambda rates: rates.steps, lambda steps: steps.share)
    token_bytes = usual(lambda rates: rates.bytes_per_token, lambda size: size.value)
    latency_s = usual(lambda rates: rates.latency, lambda latency: latency.value)
    for times, rates in peers:
        if tokens_s is not None:
            rates.prefill_tokens_s.guess(tokens_s * times)
        else:
            rates.prefill_tokens_s.presume(times * _by_plain(rates.plain_tokens_s, plain_tokens_s, times))
        if base_s is not None and step_share is not None:
            rates.steps.guess(base_s / times, step_share)
        else:
            rates.steps.presume(times)
        if token_bytes is not None:
            rates.bytes_per_token.guess(token_bytes)
        if latency_s is not None:
            rates.latency.guess(latency_s)


def _by_plain(rate: Estimate, usual: float | None, times: float) -> float:
    """How many times as fast as is usual for its weight a unit is by its plain answers. How fast all are is
    not known from them, because they wait for each other.
    """
    if usual is None or not rate.seen:
        return 1.0
    return reckon(rate.value, usual * times, rate.seen, PLAIN_ALIKE) / (usual * times)
