"""A worker's session at the control process: which requests it settles, of those that the worker reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from cellgate.proxy.admission.limits import DoorCounts, LimitedDispatcher, LimitLedger, UsageRecord
from cellgate.proxy.config.key_file import Key, KeyRing, LimitRules, TenantRules
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.log import Finished
from cellgate.proxy.request.ports import PickRequest
from cellgate.proxy.workers.control_process import WorkerSession, WorkerTotals
from cellgate.proxy.workers.protocol import ToControl, ToWorker, request_out
from cellgate.router.nouns import Ask

AT = 1_751_328_000.0
TOKENS = 100
BUSY = Failure(FailureKind.NO_UNIT, "no unit")


class Control:
    """A control process with a key that has 1000 tokens a minute, and one session. It has no unit."""

    def __init__(self, **limits: int) -> None:
        self.bills: list[UsageRecord] = []
        self.ledger = LimitLedger(lambda: AT, DoorCounts(frozenset), lambda bill, _: self.bills.append(bill))
        tenant = TenantRules("t")
        rules = LimitRules(tokens_per_minute=1000, **limits)
        self.ledger.take(KeyRing({b"": Key("k", tenant, limits=rules)}, {"t": tenant}))
        inner: Any = Mock()
        inner.acquire.return_value = BUSY
        control: Any = SimpleNamespace(
            plane=Mock(),
            dispatcher=inner,
            asked=LimitedDispatcher(inner, self.ledger),
            ledger=self.ledger,
            reports=Mock(),
            knows_all=True,
        )
        self.shared = control
        self.session = WorkerSession(control, 0, WorkerTotals(), Mock())
        self.link = self.session.link = Mock()

    def ask(self, number: int) -> bool:
        """Whether the limit has room for one more request."""
        request = PickRequest(Ask(model="m", tenant="t"), 0, charge=("k", TOKENS, 0, AT + number))
        self.session.hear((ToControl.ACQUIRE, number, request_out(request)))
        if not self.shared.knows_all:
            return True
        message: tuple[Any, ...] = self.link.send.call_args[0][0]
        assert message[0] == ToWorker.REFUSED
        return bool(message[2][0] == BUSY.kind.value)

    def settle(self, number: int, used: int = 0) -> None:
        """The worker says that one is over."""
        bill = UsageRecord("r", "k", "t", "m", "m", "chat", 499, AT + number, TOKENS, 0, used, 0, True)
        self.session.hear((ToControl.SETTLED, *bill))

    def used(self) -> int:
        """Tokens of the limit."""
        ((_, meter),) = self.ledger.meters()
        return meter.spent


def test_a_request_that_was_charged_gets_back_what_it_did_not_use() -> None:
    control = Control()
    assert [control.ask(number) for number in range(3)] == [True] * 3
    control.settle(0)
    control.settle(1, used=30)
    assert control.used() == TOKENS + 30
    assert len(control.bills) == 2


def test_one_that_left_before_it_was_charged_gets_nothing_back() -> None:
    """Its worker cannot know that: it may have been cancelled while leases of all workers were collected."""
    control = Control()
    control.ask(0)
    control.shared.knows_all = False
    control.ask(1)
    control.session.hear((ToControl.CANCEL, 1))
    control.settle(1)
    assert control.used() == TOKENS
    assert control.bills == []


def test_one_that_an_earlier_control_process_has_charged_has_what_it_used() -> None:
    control = Control(in_flight=1)
    assert control.ask(0)
    control.settle(7, used=30)
    assert control.used() == TOKENS + 30
    assert [bill.prompt_tokens for bill in control.bills] == [30]
    # It gives back no place that another one has.
    assert not control.ask(1)


def test_a_worker_that_ends_gives_the_places_back_that_its_requests_have() -> None:
    control = Control(in_flight=2)
    assert [control.ask(0), control.ask(1), control.ask(2)] == [True, True, False]
    control.settle(0)
    control.session.vacate()
    assert [control.ask(3), control.ask(4), control.ask(5)] == [True, True, False]


def test_the_record_of_a_request_that_has_ended_at_a_worker_is_whole() -> None:
    control = Control()
    control.session.hear((ToControl.FINISHED, "chat", 200, "u1", 0.5, 1.5, 10, 20))
    (record,) = control.shared.reports.finished.call_args[0]
    assert record == Finished(*record)
    assert (record.route, record.status, record.unit, record.bytes_out, record.rank) == (
        "chat",
        200,
        "u1",
        20,
        None,
    )
