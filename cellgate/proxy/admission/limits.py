"""The ledger of limits: what each key and tenant has used, and whether a request may use more. Pure; amounts
are whole numbers.

A meter stands alone, or is one of several gates that share a counter (extras/redis/sharing.py). A sharing
meter spends only what it holds: slices that were taken from the counter in the background, so no request
waits for them. Rules:
1. `spent` never passes `held`, but by one request that is larger than a slice, and only where nobody holds
   the rest. What fits into a slice waits for it: others may have taken the rest since this gate has looked.
2. In a new window, until the counter has answered, each gate holds half of its even share.
3. A meter that has lost the counter stands alone: each gate then passes at most the whole limit.

In this order: `LimitLedger`, `Account`, `LimitPlan`, `UsageRecord`, `KeyCounts`, `LimitedDispatcher`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum, IntEnum
from itertools import chain, islice
from math import ceil, inf
from typing import NamedTuple, Protocol

from prometheus_client import Metric

from cellgate.proxy.config.key_file import KeyRing, LimitRules, TokenPrice
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.families import counter, one_counter, one_gauge
from cellgate.proxy.request.ports import Charge, Dispatcher, Pending, PickRequest, Waiter
from cellgate.router.nouns import Ask
from cellgate.router.unit_state import Lease

MINUTE_S, DAY_S = 60.0, 86_400.0
IMPOSSIBLE = 16
"""A counter of Redis at so many times its limit was not written by gates."""
ACCOUNTS_A_TICK = 256
"""A millisecond or two."""
IN_FLIGHT = "in_flight"
"""The limit of requests at one time, in `Failure.used_up` and the label of refusals."""


class LimitLedger:
    """The accounts of one gate. `wall` is the wall clock; `counts` has what its metrics show.

    `gates` share the limits (0: this gate stands alone); `on_low` is called when a shared limit runs low,
    `record`, if there is one, with each bill.
    """

    def __init__(self, wall: Callable[[], float], counts: KeyCounts, record: TakeUsage | None) -> None:
        self.gates = 0
        self.counts = counts
        self.on_low: Callable[[], None] = lambda: None
        self._wall = wall
        self._record = record
        self._prices = KeyRing().prices
        self._rules: Mapping[str, LimitRules] = {}
        self._accounts: dict[str, Account] = {}
        self._plans: dict[tuple[str, str], LimitPlan] = {}
        self._old_plans: list[dict[tuple[str, str], LimitPlan]] = []
        self._stale: dict[str, Account] = {}
        """Accounts that have not got the present limits yet."""

    def take(self, ring: KeyRing) -> None:
        """These keys, tenants and prices hold from now on. What was used of limits stays used. However many
        there are, it takes no time: an account gets its limits with its next request, or from `tick`.
        """
        self._prices, self._rules = ring.prices, ring.limits
        self._old_plans.append(self._plans)
        self._plans = {}
        stale, self._accounts = self._accounts, self._stale
        self._accounts, self._stale = {}, stale if not self._accounts else self._accounts | stale

    def tick(self) -> None:
        """A few times a second: some of the accounts get their limits, and some of what is old goes."""
        for title in list(islice(self._stale, ACCOUNTS_A_TICK)):
            if title in self._rules:
                self._account(title)
            else:
                del self._stale[title]
        if self._old_plans:
            plans = self._old_plans[0]
            for _ in range(min(ACCOUNTS_A_TICK, len(plans))):
                plans.popitem()
            if not plans:
                del self._old_plans[0]

    # -- for requests --------------------------------------------------------------------------------------

    def admit(self, charge: Charge, ask: Ask) -> bytes | Failure:
        """Charge a request: header lines for its client; or why it may not have a unit."""
        key, prompt, completion, at = charge
        plan = self._plans.get((key, ask.tenant)) or self._plan(key, ask.tenant)
        money = self._money(ask.model or "", prompt, completion) if self._prices else 0
        amounts = 1, prompt + completion, money
        if not plan.charge(amounts, amounts, at, self.gates):
            # Much that answers may have is never used: what is left need only have room for a beginning.
            begun = 1 if completion else 0
            least = 1, prompt + begun, self._money(ask.model or "", prompt, begun) if self._prices else 0
            if not plan.charge(amounts, least, at, self.gates):
                if self.gates and plan.is_low():
                    self.on_low()
                return self._refusal(plan, least, at, ask.tenant)
        if self.gates and plan.is_low():
            self.on_low()
        return plan.lines(at)

    def spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        """The answer of a request in flight has so many tokens more than it was charged with, for `model`."""
        plan = self._plans.get((key, tenant)) or self._plan(key, tenant)
        plan.correct((0, tokens, self._money(model, 0, tokens)), self._wall())

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused at its key: of this limit nothing is left."""
        self.counts.refused(tenant, limit)

    def settle(self, used: UsageRecord) -> None:
        """A request that was charged is over."""
        plan = self._plans.get((used.key, used.tenant)) or self._plan(used.key, used.tenant)
        more_prompt = used.prompt_tokens - used.prompt_charged
        more_completion = used.completion_tokens - used.completion_charged
        if not self._prices:
            money = 0
        elif used.model == used.model_charged:
            money = self._money(used.model, more_prompt, more_completion)
        else:
            charged = self._money(used.model_charged, used.prompt_charged, used.completion_charged)
            money = self._money(used.model, used.prompt_tokens, used.completion_tokens) - charged
        plan.correct((0, more_prompt + more_completion, money), used.at)
        plan.release()
        self.counts.used(used)
        if self._record is not None:
            self._record(used, self._money(used.model, used.prompt_tokens, used.completion_tokens) / MICRO)

    def settle_unknown(self, used: UsageRecord) -> None:
        """A request is over that was not charged here: an earlier control process did that, or nobody. It
        gets nothing back, and what it has used is charged now.
        """
        if used.prompt_tokens or used.completion_tokens:
            self._plan(used.key, used.tenant).enter()
            self.settle(used._replace(prompt_charged=0, completion_charged=0))

    def abandon(self, key: str, tenant: str) -> None:
        """A request that was charged will never be settled: its worker has ended."""
        self._plan(key, tenant).release()

    # -- for those who share limits ------------------------------------------------------------------------

    def meters(self) -> Iterator[tuple[str, Meter]]:
        """The meters in use, with a name for the counter of each one's window."""
        for account in chain(self._accounts.values(), self._stale.values()):
            title = account.title.replace(" ", ":")
            for kind, meter in account.meters.items():
                yield f"{title}:{kind.field}:{int(meter.begins_at)}", meter

    def running(self) -> list[tuple[str, Meter]]:
        """Those whose window is not over: of the others, nothing is used until their next one begins."""
        at = self._wall()
        return [(counter, meter) for counter, meter in self.meters() if at < meter.ends_at]

    def stand_alone(self) -> None:
        """Nothing is shared from now on."""
        self.gates = 0
        for _, meter in self.meters():
            meter.stand_alone()

    # -- inside --------------------------------------------------------------------------------------------

    def _plan(self, key: str, tenant: str) -> LimitPlan:
        titles = [f"tenant {tenant}", *([f"key {key}"] if key else [])]
        plan = LimitPlan(tuple(self._account(title) for title in titles if title in self._rules))
        self._plans[key, tenant] = plan
        return plan

    def _account(self, title: str) -> Account:
        """It has the limits of now."""
        found = self._accounts.get(title)
        if found is None:
            found, rules, at = self._stale.pop(title, None), self._rules[title], self._wall()
            if found is None:
                found = Account(title, rules, at, self.gates)
            else:
                found.configure(rules, at, self.gates)
            self._accounts[title] = found
        return found

    def _money(self, model: str, prompt: int, completion: int) -> int:
        """In millionths: a price is for a million tokens."""
        price = self._prices.get(model, _FREE)
        return round(prompt * price.prompt + completion * price.completion)

    def _refusal(self, plan: LimitPlan, amounts: Amounts, at: float, tenant: str) -> Failure:
        account, kind = plan.lacking(amounts)
        lines = plan.lines(at)
        if kind is None:
            self.counts.refused(tenant, IN_FLIGHT)
            message = f"{account.title} has as many requests in flight as it may ({account.in_flight_max})"
            words = f"{message}; retry in 1 s"
            return Failure(FailureKind.LIMITED, words, retry_after_s=1, lines=lines, used_up=IN_FLIGHT)
        self.counts.refused(tenant, kind.field)
        # What others of this key do not use comes back when they end.
        soon_s = GIVEN_BACK_S if plan.in_flight else inf
        return self._over(account, kind, amounts, at, lines, soon_s)

    def _over(
        self, account: Account, kind: MeterKind, amounts: Amounts, at: float, lines: bytes, soon_s: float
    ) -> Failure:
        meter, what = account.meters[kind], _MEASURE_WORDS[kind.measure]
        if amounts[kind.measure] > meter.limit:
            message = (
                f"this request needs {amounts[kind.measure]:,} {what}, more than {account.title} may use "
                f"in a {kind.period.value} ({kind.field}: {meter.limit:,}); send a shorter one"
            )
            return Failure(FailureKind.OVER_BUDGET, message, lines=lines)
        # What other gates hold and do not need comes back within a second.
        wait_s = 1 if amounts[kind.measure] <= meter.left else max(1, ceil(min(meter.ends_at - at, soon_s)))
        message = (
            f"{account.title} has used its {what} of this {kind.period.value} ({kind.field}), or this "
            f"request needs more than are left; retry in {wait_s} s"
        )
        is_rate = kind.period is Period.MINUTE
        failure = FailureKind.LIMITED if is_rate else FailureKind.OVER_BUDGET
        used_up = "" if meter.left else kind.field
        return Failure(failure, message, retry_after_s=wait_s, lines=lines, used_up=used_up)


class Period(Enum):
    """The windows of the clock, in UTC."""

    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"

    def window(self, at: float) -> tuple[float, float]:
        """When the window of a time begins and ends, in seconds since 1970."""
        if self is Period.MONTH:
            month = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
            return month.timestamp(), (month + timedelta(days=32)).replace(day=1).timestamp()
        length_s = MINUTE_S if self is Period.MINUTE else DAY_S
        begins_at = at // length_s * length_s
        return begins_at, begins_at + length_s


class Meter:
    """One limit, from `at` on, of one gate or of several `gates` (0: it stands alone). `spent` is what this
    gate has used in the window.

    Of a sharing meter: `taken` is what this gate has taken from the counter, `held` what of that counts,
    `free` what no gate has taken, as far as is known.
    """

    __slots__ = (
        "_is_short",
        "_looked",
        "begins_at",
        "ends_at",
        "free",
        "held",
        "is_alone",
        "limit",
        "period",
        "shared_by",
        "spent",
        "taken",
    )

    def __init__(self, limit: int, period: Period, at: float, gates: int = 0) -> None:
        self.limit = limit
        self.period = period
        self.roll(at, gates)

    def roll(self, at: float, gates: int) -> None:
        """A new window begins."""
        self.begins_at, self.ends_at = self.period.window(at)
        self.spent = self.taken = self._looked = 0
        self._is_short = False
        self.is_alone, self.shared_by = not gates, gates
        self.held = self.limit // (2 * gates) if gates else self.limit
        self.free = self.limit - self.held

    def has_room(self, amount: int) -> bool:
        """Whether so much more may be used: of what no gate has taken, too, but for one for each of them,
        where no slice is as large.
        """
        room = self.held - self.spent
        if amount <= room:
            return True
        self._is_short = True
        return room >= 0 and self._slice(room + self.free) < amount <= room + self.free - self.shared_by

    @property
    def left(self) -> int:
        """What may still be used, by all gates together, as far as is known."""
        return max(0, self.held - self.spent + self.free)

    @property
    def is_low(self) -> bool:
        """Whether it should look at the counter soon: it has not in this window, or what it holds is used, or
        less than a request that came, and there is something to be taken.
        """
        return not self.taken or (self.free > 0 and (self._is_short or self.spent >= self.held))

    def change(self, limit: int) -> None:
        """It has another limit from now on."""
        more, self.limit = limit - self.limit, limit
        if self.is_alone:
            self.held = limit
            return
        self.free += more
        if self.free < 0:
            self.held, self.free = self.held + self.free, 0

    # -- sharing -------------------------------------------------------------------------------------------

    def to_take(self, gates: int) -> int:
        """What to take from the counter now; less than 0: what to give back.

        It is what was used and is not taken yet, and a slice for the next requests: twice what was used since
        the last call, between a quarter and a half of an even share of what is left.
        """
        self.shared_by, self._is_short = gates, False
        left, new = self.left, self.spent - self._looked
        self._looked = self.spent
        slice_ = max(self._slice(left), min(2 * new, left // (2 * gates)))
        amount = self.spent + min(left, slice_) - self.taken
        if amount < 0:
            # Others may have it before the answer comes, which may be lost.
            self.held += amount
        return amount

    def _slice(self, left: int) -> int:
        """What is taken of what is left, at least."""
        return max(1, left // (4 * max(self.shared_by, 1)))

    def took(self, amount: int, total: int) -> None:
        """So much was taken, and all gates have taken `total` now."""
        if total > IMPOSSIBLE * self.limit + self.spent:
            # No gates have taken that: it says nothing.
            self.stand_alone()
            return
        self.is_alone = False
        self.taken += amount
        self.held = self.taken - max(0, total - self.limit)
        # Nobody gives back what this gate has taken.
        self.free = max(0, self.limit - max(total, self.taken))

    def stand_alone(self) -> None:
        """The counter is lost: only what this gate has used counts."""
        self.is_alone = True
        self.held, self.free = self.limit, 0


# The limits of one key or tenant, and what it has used of them. Pure.


MICRO = 1_000_000
"""Money is counted in millionths."""


class Measure(IntEnum):
    """What a limit counts: the place in an `Amounts`."""

    REQUESTS = 0
    TOKENS = 1
    MONEY = 2


Amounts = tuple[int, int, int]
"""Requests, tokens, money."""


class MeterKind(NamedTuple):
    """What a field of `LimitRules` limits."""

    field: str
    measure: Measure
    period: Period


METERS = (
    MeterKind("requests_per_minute", Measure.REQUESTS, Period.MINUTE),
    MeterKind("tokens_per_minute", Measure.TOKENS, Period.MINUTE),
    MeterKind("tokens_per_day", Measure.TOKENS, Period.DAY),
    MeterKind("tokens_per_month", Measure.TOKENS, Period.MONTH),
    MeterKind("cost_per_day", Measure.MONEY, Period.DAY),
    MeterKind("cost_per_month", Measure.MONEY, Period.MONTH),
)


class Account:
    """`title` says whose limits they are: `key NAME` or `tenant NAME`. `gates` share them; 0: none do.

    `in_flight` is counted where it is limited.
    """

    __slots__ = ("in_flight", "in_flight_max", "meters", "title")

    def __init__(self, title: str, rules: LimitRules, at: float, gates: int) -> None:
        self.title = title
        self.in_flight = 0
        self.meters: dict[MeterKind, Meter] = {}
        self.configure(rules, at, gates)

    def configure(self, rules: LimitRules, at: float, gates: int) -> None:
        """Apply these limits; what was used of them stays used."""
        before, self.meters = self.meters, {}
        self.in_flight_max = rules.in_flight
        for kind in METERS:
            limit = getattr(rules, kind.field)
            if limit is not None:
                limit = round(limit * MICRO) if kind.measure is Measure.MONEY else limit
                self.meters[kind] = before.get(kind) or Meter(limit, kind.period, at, gates)
                self.meters[kind].change(limit)


# All limits of the requests of one key, laid out for the request path: its own, and its tenant's. Pure.
#
# Each request comes here twice, so it is written for few bytecodes.


_LIMIT_NAMES = {Measure.REQUESTS: b"requests", Measure.TOKENS: b"tokens"}
_LIMIT_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%ds\r\n"


class LimitPlan:
    """The limits of these accounts. `in_flight`: requests that may yet give something back."""

    def __init__(self, accounts: tuple[Account, ...]) -> None:
        self._accounts = accounts
        self._bounded = tuple(account for account in accounts if account.in_flight_max is not None)
        self._meters = tuple(
            (meter, int(kind.measure)) for account in accounts for kind, meter in account.meters.items()
        )
        self._ends_at = 0.0
        self.in_flight = 0
        self._shown: list[tuple[Meter, tuple[Meter, ...]]] = []
        self._template = b""
        for measure, name in _LIMIT_NAMES.items():
            meters = tuple(
                meter
                for account in accounts
                for kind, meter in account.meters.items()
                if kind.period is Period.MINUTE and kind.measure is measure
            )
            if meters:
                self._shown.append((meters[0], meters[1:]))
                self._template += _LIMIT_LINES % (name, name, name)

    def charge(self, amounts: Amounts, least: Amounts, at: float, gates: int) -> bool:
        """Charge a request with `amounts`. False: a limit has no room for `least`, and nothing is charged."""
        if at >= self._ends_at:
            self._roll(at, gates)
        for account in self._bounded:
            if account.in_flight >= (account.in_flight_max or 0):
                return False
        for meter, measure in self._meters:
            spent = meter.spent + amounts[measure]
            if spent > meter.held and not meter.has_room(least[measure]):
                self._take_back(amounts, meter)
                return False
            meter.spent = spent
        for account in self._bounded:
            account.in_flight += 1
        self.in_flight += 1
        return True

    def _take_back(self, amounts: Amounts, full: Meter) -> None:
        """What was charged to the meters before this one."""
        for meter, measure in self._meters:
            if meter is full:
                return
            meter.spent -= amounts[measure]

    def correct(self, amounts: Amounts, charged_at: float) -> None:
        """So much more was used than charged; less than 0: so much less, which counts only while the window
        lasts in which it was charged.
        """
        for meter, measure in self._meters:
            amount = amounts[measure]
            if amount > 0 or (amount and charged_at >= meter.begins_at):
                spent = meter.spent + amount
                meter.spent = spent if spent > 0 else 0

    def enter(self) -> None:
        """A request is there that no limit was asked about."""
        self.in_flight += 1
        for account in self._bounded:
            account.in_flight += 1

    def release(self) -> None:
        """A request is over."""
        self.in_flight -= self.in_flight > 0
        for account in self._bounded:
            account.in_flight -= account.in_flight > 0

    def lacking(self, amounts: Amounts) -> tuple[Account, MeterKind | None]:
        """The first limit without room for these; a kind of None: requests in flight."""
        for account in self._accounts:
            for kind, meter in account.meters.items():
                if not meter.has_room(amounts[kind.measure]):
                    return account, kind
        return next(each for each in self._bounded if each.in_flight >= (each.in_flight_max or 0)), None

    def is_low(self) -> bool:
        """Whether a shared limit should take another slice soon."""
        return any(meter.is_low for meter, _ in self._meters)

    def lines(self, at: float) -> bytes:
        """Header lines for a client, as OpenAI's API has them: of several limits of the same, the one with
        the least left.

        https://platform.openai.com/docs/guides/rate-limits: x-ratelimit-{limit,remaining,reset}-{requests,
        tokens}; a reset is a duration such as 12s.
        """
        if not self._shown:
            return b""
        values: list[int] = []
        # All of these windows end at once.
        reset_s = int(self._shown[0][0].ends_at - at) + 1
        for least, others in self._shown:
            left = least.held - least.spent + least.free
            for meter in others:
                rest = meter.held - meter.spent + meter.free
                if rest < left:
                    least, left = meter, rest
            values += least.limit, left if left > 0 else 0, reset_s
        return self._template % tuple(values)

    def _roll(self, at: float, gates: int) -> None:
        self._ends_at = inf
        for meter, _ in self._meters:
            if at >= meter.ends_at:
                meter.roll(at, gates)
            self._ends_at = min(self._ends_at, meter.ends_at)


class UsageRecord(NamedTuple):
    """What one request was charged with, and what it has used. Tokens are whole numbers.

    `model` has answered; `model_charged` is the one whose price it was charged with: another one, if it was
    served by a fallback.

    `at` is when it was charged, in seconds since 1970; `is_estimated`: its engine has not said what it used.
    """

    request_id: str
    key: str
    tenant: str
    model: str
    model_charged: str
    route: str
    status: int
    at: float
    prompt_charged: int
    completion_charged: int
    prompt_tokens: int
    completion_tokens: int
    is_estimated: bool


class Accounts(Protocol):
    """Where requests are accounted for: the ledger of this process, or that of the control process."""

    def spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        """The answer of a request that is in flight has so many tokens more than it was charged with."""

    def settle(self, used: UsageRecord) -> None:
        """A request that was charged is over."""

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused at its key: of this limit nothing is left."""


# What keys and limits count, as Prometheus metric families. Labels are names of the file of keys, and
# models of the configuration; nothing that a client can choose.


OTHER = ""
"""The label of models that no configuration names."""


class KeyCounts:
    """Counts in plain numbers. `models` gives the models of the configuration."""

    def __init__(self, models: Callable[[], frozenset[str]]) -> None:
        self._models = models
        self._used: dict[tuple[str, str], list[int]] = {}
        """Tokens of prompts and of answers, by tenant and by the model of an answer: only what units serve.
        """
        self._refused: Counter[tuple[str, str]] = Counter()
        self.is_stale = False
        """Whether the present file of keys was refused, so that the old keys hold."""
        self.shares: bool | None = None
        """Whether limits are shared with other gates now; None: they never are."""
        self.lines_lost: Callable[[], int] = int

    def used(self, used: UsageRecord) -> None:
        """A request is over."""
        if used.prompt_tokens or used.completion_tokens:
            tokens = self._used.get((used.tenant, used.model)) or self._used.setdefault(
                (used.tenant, used.model), [0, 0]
            )
            tokens[0] += used.prompt_tokens
            tokens[1] += used.completion_tokens

    def refused(self, tenant: str, limit: str) -> None:
        """A limit was reached."""
        self._refused[tenant, limit] += 1

    def collect(self) -> Iterator[Metric]:
        labels, known = ("tenant", "model", "kind"), self._models()
        used = Counter[tuple[str, str, str]]()
        for (tenant, model), (prompt, completion) in self._used.items():
            label = tenant, model if model in known else OTHER
            used[*label, "prompt"] += prompt
            used[*label, "completion"] += completion
        yield counter(
            "tenant_tokens",
            "Tokens of prompts and of answers (completion), by tenant and configured model.",
            labels,
            used.items(),
        )
        yield counter(
            "limited_requests",
            "Requests that were refused because of a limit, by tenant and limit.",
            ("tenant", "limit"),
            self._refused.items(),
        )
        yield one_gauge("key_file_refused", "1 while the present file of keys has a mistake.", self.is_stale)
        if self.shares is not None:
            yield one_gauge(
                "limits_shared",
                "1: gates share their limits. 0: Redis does not answer, and each gate counts alone.",
                self.shares,
            )
        yield one_counter(
            "usage_lines_lost",
            "Lines that the usage log has lost, because its file takes none.",
            self.lines_lost(),
        )


# The ledger of a gate: what each key and tenant has used, and whether a request may use more.
#
# There is one for all workers, at the control process. A request is charged with what it is expected to take
# before it gets a unit, and settled at its end with what it took. What passes is reckoned without waiting for
# anybody: limits of several gates are shared in slices (extras/redis/sharing.py).


_FREE = TokenPrice()
_MEASURE_WORDS = {Measure.REQUESTS: "requests", Measure.TOKENS: "tokens", Measure.MONEY: "money"}

GIVEN_BACK_S = 5
"""When a request is worth another try that was refused while others of its key are in flight."""

TakeUsage = Callable[[UsageRecord, float], None]
"""Takes note of a bill and its cost."""


class LimitedDispatcher:
    """`inner`, and before it the limits of `ledger`, which charge a request first, unless they refuse it."""

    def __init__(self, inner: Dispatcher, ledger: LimitLedger) -> None:
        self._acquire: Callable[[PickRequest, Waiter], Lease | Failure | Pending] = inner.acquire
        self._ledger = ledger
        self.acquire_other = inner.acquire_other
        self.paid_retries = inner.paid_retries
        self.committed = inner.committed
        self.completed = inner.completed
        self.released = inner.released
        self.blame = inner.blame

    def acquire(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        """A lease, or why there is none. Pending: the waiter gets the result later, once."""
        charge = request.charge
        if charge is None:
            return self._acquire(request, waiter)
        lines = self._ledger.admit(charge, request.ask)
        if isinstance(lines, Failure):
            return lines
        found = self._acquire(request, _Labelled(waiter, lines) if lines else waiter)
        if isinstance(found, Lease):
            found.lines += lines
        return found


class _Labelled:
    """A waiter whose lease gets header lines."""

    def __init__(self, waiter: Waiter, lines: bytes) -> None:
        self._waiter = waiter
        self._lines = lines

    def on_result(self, found: Lease | Failure) -> None:
        if isinstance(found, Lease):
            found.lines += self._lines
        self._waiter.on_result(found)

    def crashed(self, error: Exception) -> None:
        self._waiter.crashed(error)
