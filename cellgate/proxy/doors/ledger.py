"""The ledger of a gate: what each key and tenant has used, and whether a request may use more.

There is one for all workers, at the control process. A request is charged with what it is expected to take
before it gets a unit, and settled at its end with what it took. What passes is reckoned without waiting for
anybody: limits of several gates are shared in slices (meters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, inf

from cellgate.proxy.config.keys import KeyRing, LimitRules, TokenPrice
from cellgate.proxy.doors.account import MICRO, Account, Amounts, Measure, MeterKind
from cellgate.proxy.doors.bill import Bill
from cellgate.proxy.doors.limit_plan import LimitPlan
from cellgate.proxy.doors.meters import Meter, Period
from cellgate.proxy.doors.metrics import DoorCounts
from cellgate.proxy.request.dispatcher import Charge
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.nouns import Ask

_FREE = TokenPrice()
_WORDS = {Measure.REQUESTS: "requests", Measure.TOKENS: "tokens", Measure.MONEY: "money"}

GIVEN_BACK_S = 5
"""When a request is worth another try that was refused while others of its key are in flight."""

TakeBill = Callable[[Bill, float], None]
"""Takes note of a bill and its cost."""


class LimitLedger:
    """The accounts of one gate. `wall` is the wall clock; `counts` has what its metrics show.

    `gates` share the limits (0: this gate stands alone); `on_low` is called when a shared limit runs low,
    `record`, if there is one, with each bill.
    """

    def __init__(self, wall: Callable[[], float], counts: DoorCounts, record: TakeBill | None) -> None:
        self.gates = 0
        self.counts = counts
        self.on_low: Callable[[], None] = lambda: None
        self._wall = wall
        self._record = record
        self._prices = KeyRing().prices
        self._rules: dict[str, LimitRules] = {}
        self._accounts: dict[str, Account] = {}
        self._plans: dict[tuple[str, str], LimitPlan] = {}

    def take(self, ring: KeyRing) -> None:
        """These keys, tenants and prices hold from now on. What was used of limits stays used."""
        self._prices = ring.prices
        tenants = {f"tenant {name}": tenant.limits for name, tenant in ring.tenants.items()}
        self._rules = tenants | {f"key {key.name}": key.limits for key in ring.keys.values()}
        self._plans.clear()
        at = self._wall()
        for title, account in list(self._accounts.items()):
            if title in self._rules:
                account.configure(self._rules[title], at, self.gates)
            else:
                del self._accounts[title]

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
                return self._refusal(plan, least, at, ask.tenant)
        if self.gates and plan.is_low():
            self.on_low()
        return plan.lines(at)

    def spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        """The answer of a request in flight has so many tokens more than it was charged with, for `model`."""
        plan = self._plans.get((key, tenant)) or self._plan(key, tenant)
        plan.correct((0, tokens, self._money(model, 0, tokens)), self._wall())

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused at the door: of this limit nothing is left."""
        self.counts.refused(tenant, limit)

    def settle(self, bill: Bill) -> None:
        """A request that was charged is over."""
        plan = self._plans.get((bill.key, bill.tenant)) or self._plan(bill.key, bill.tenant)
        more_prompt = bill.prompt_tokens - bill.prompt_charged
        more_completion = bill.completion_tokens - bill.completion_charged
        if not self._prices:
            money = 0
        elif bill.model == bill.model_charged:
            money = self._money(bill.model, more_prompt, more_completion)
        else:
            charged = self._money(bill.model_charged, bill.prompt_charged, bill.completion_charged)
            money = self._money(bill.model, bill.prompt_tokens, bill.completion_tokens) - charged
        plan.correct((0, more_prompt + more_completion, money), bill.at)
        plan.release()
        self.counts.used(bill)
        if self._record is not None:
            self._record(bill, self._money(bill.model, bill.prompt_tokens, bill.completion_tokens) / MICRO)

    def settle_unknown(self, bill: Bill) -> None:
        """A request is over that was not charged here: an earlier control process did that, or nobody. It
        gets nothing back, and what it has used is charged now.
        """
        if bill.prompt_tokens or bill.completion_tokens:
            self._plan(bill.key, bill.tenant).enter()
            self.settle(bill._replace(prompt_charged=0, completion_charged=0))

    def abandon(self, key: str, tenant: str) -> None:
        """A request that was charged will never be settled: its worker has ended."""
        self._plan(key, tenant).release()

    # -- for those who share limits ------------------------------------------------------------------------

    def meters(self) -> Iterator[tuple[str, Meter]]:
        """The meters in use, with a name for the counter of each one's window."""
        for account in self._accounts.values():
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
        if title not in self._accounts:
            self._accounts[title] = Account(title, self._rules[title], self._wall(), self.gates)
        return self._accounts[title]

    def _money(self, model: str, prompt: int, completion: int) -> int:
        """In millionths: a price is for a million tokens."""
        price = self._prices.get(model, _FREE)
        return round(prompt * price.prompt + completion * price.completion)

    def _refusal(self, plan: LimitPlan, amounts: Amounts, at: float, tenant: str) -> Failure:
        account, kind = plan.lacking(amounts)
        lines = plan.lines(at)
        if kind is None:
            self.counts.refused(tenant, "in_flight")
            message = f"{account.title} has as many requests in flight as it may ({account.in_flight_max})"
            return Failure(FailureKind.LIMITED, f"{message}; retry in 1 s", retry_after_s=1, lines=lines)
        self.counts.refused(tenant, kind.field)
        # What others of this key do not use comes back when they end.
        soon_s = GIVEN_BACK_S if plan.in_flight else inf
        return self._over(account, kind, amounts, at, lines, soon_s)

    def _over(
        self, account: Account, kind: MeterKind, amounts: Amounts, at: float, lines: bytes, soon_s: float
    ) -> Failure:
        meter, what = account.meters[kind], _WORDS[kind.measure]
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
