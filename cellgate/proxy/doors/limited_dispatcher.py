"""A dispatcher behind limits: a request is charged before it gets a unit, or waits for one."""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.doors.ledger import LimitLedger
from cellgate.proxy.request.dispatcher import Dispatcher, Pending, PickRequest, Waiter
from cellgate.proxy.wire.failure import Failure
from cellgate.router.unit_state import Lease


class LimitedDispatcher:
    """`inner`, and before it the limits of `ledger`. A refused request has not been charged."""

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

    __slots__ = ("_lines", "_waiter")

    def __init__(self, waiter: Waiter, lines: bytes) -> None:
        self._waiter = waiter
        self._lines = lines

    def on_result(self, found: Lease | Failure) -> None:
        """What came of waiting."""
        if isinstance(found, Lease):
            found.lines += self._lines
        self._waiter.on_result(found)

    def crashed(self, error: Exception) -> None:
        """Passing the result on has failed."""
        self._waiter.crashed(error)
