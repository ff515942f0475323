"""All limits of the requests of one key, laid out for the request path: its own, and its tenant's. Pure.

Each request comes here twice, so it is written for few bytecodes.
"""

from __future__ import annotations

from math import inf

from cellgate.proxy.doors.account import Account, Amounts, Measure, MeterKind
from cellgate.proxy.doors.meters import Meter, Period

_NAMES = {Measure.REQUESTS: b"requests", Measure.TOKENS: b"tokens"}
_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%ds\r\n"


class LimitPlan:
    """The limits of these accounts. `in_flight`: requests that may yet give something back."""

    __slots__ = ("_accounts", "_bounded", "_ends_at", "_meters", "_shown", "_template", "in_flight")

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
        for measure, name in _NAMES.items():
            meters = tuple(
                meter
                for account in accounts
                for kind, meter in account.meters.items()
                if kind.period is Period.MINUTE and kind.measure is measure
            )
            if meters:
                self._shown.append((meters[0], meters[1:]))
                self._template += _LINES % (name, name, name)

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
            account.in_flight = max(0, account.in_flight - 1)

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
