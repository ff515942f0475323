"""Workers: who accepts, what a session settles, frames between processes, and who is killed."""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.extras.workers.control_process import WorkerSession, WorkerTotals
from cellgate.extras.workers.protocol import (
    Frames,
    Message,
    ToControl,
    ToWorker,
    ask_in,
    ask_out,
    failure_in,
    failure_out,
    framed,
    request_out,
)
from cellgate.extras.workers.remote import BoardReplica, BoardUpdates, fleet_in, fleet_out, new_counts
from cellgate.extras.workers.supervisor import (
    CONTROL,
    CONTROL_STILL_S,
    SUPERVISOR_LATE_S,
    WORKER_STILL_S,
    Child,
    Supervisor,
)
from cellgate.extras.workers.worker import STUCK_MS, Page, SharedEntrance
from cellgate.proxy.admission.limits import KeyCounts, LimitedDispatcher, LimitLedger, UsageRecord
from cellgate.proxy.config.key_file import Key, KeyRing, LimitRules, TenantRules
from cellgate.proxy.config.limits import REACHED, reached
from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.process.tcp_info import accept_queue
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.ports import PickRequest
from cellgate.router.board import Board
from cellgate.router.nouns import (
    Ask,
    Cell,
    Evidence,
    Fleet,
    KvEvents,
    Load,
    Node,
    Role,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from tests.unit.request.test_body import bodies, law

NOW = 1000.0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_nobody_is_left_waiting_and_nobody_is_ahead_by_more_than_one(
    clients: list[int], waiting: int
) -> None:
    """Each worker takes its share of those that wait, one worker after the other, until none waits."""
    page, after = Page(len(clients)), list(clients)
    for worker, count in enumerate(clients):
        page.note(worker, count, NOW)
    left = waiting
    while left:
        before = left
        for worker in range(len(clients)):
            share = min(left, page.share(worker, left, NOW))
            for _ in range(share):
                page.take(worker)
            after[worker] += share
            left -= share
        assert left < before
    assert all(count <= min(after) + 1 for count, had in zip(after, clients, strict=True) if count > had)


def test_who_does_not_accept_or_is_stuck_is_waited_for_by_nobody() -> None:
    page = Page(2)
    page.note(0, 5, NOW)
    assert page.share(0, 1, NOW) == 1
    page.note(1, 0, NOW)
    assert page.share(0, 1, NOW) == 0
    later = NOW + (STUCK_MS + 1) / 1000
    page.note(0, 5, later)
    assert page.share(0, 10, later) == 10
    page.note(1, 0, later)
    assert page.share(0, 1, later) == 0, "it moves again"
    page.leave(1)
    assert page.share(0, 1, later) == 1


@pytest.mark.parametrize(("counts", "waiting", "most"), [((4, 0, 7), 20, 20), ((3, 3), 1, 2)])
def test_shares_that_are_taken_at_the_same_moment_are_no_more_than_those_that_wait(
    counts: tuple[int, ...], waiting: int, most: int
) -> None:
    """But that any of equals may take the only one."""
    page = Page(len(counts))
    for worker, count in enumerate(counts):
        page.note(worker, count, NOW)
    assert sum(page.share(worker, waiting, NOW) for worker in range(len(counts))) in (most, most - 1)


def test_for_how_long_a_process_has_stood_still() -> None:
    page = Page(2)
    for process in (-1, 0, 1):
        assert page.still_s(process, NOW) is None
        page.beat(process, NOW + process)
    assert [page.still_s(process, NOW + 5.0) for process in (-1, 0, 1)] == [6.0, 5.0, 4.0]
    # Its clock may have been read a moment later.
    assert page.still_s(1, NOW) == 0.0
    page.await_beat(0)
    assert page.still_s(0, NOW) is None
    # The milliseconds begin again after 49 days.
    page.beat(0, 2**32 / 1000 - 1.0)
    assert page.still_s(0, 2**32 / 1000 + 1.0) == 2.0
    assert page.still_s(-1, NOW) == 1.0
    assert page.share(0, 1, NOW) == 1, "it is apart from who takes the next"


# Workers that share a listener: who accepts those that wait on it, and when.

HERE = Address("127.0.0.1", 0)
FEW_TURNS = 8


class Worker:
    """One that accepts on its own copy of the listener. `clients` are those it has."""

    def __init__(self, page: Page, number: int) -> None:
        self.clients: list[asyncio.Protocol] = []
        loop = asyncio.get_running_loop()
        self.entrance = SharedEntrance(loop, self._connection, page, number, lambda: len(self.clients), print)

    def _connection(self) -> asyncio.Protocol:
        self.clients.append(asyncio.Protocol())
        return self.clients[-1]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        made.setblocking(False)
        yield made


def arrive(stack: ExitStack, listener: socket.socket, clients: int) -> None:
    """So many clients connect, and wait."""
    for _ in range(clients):
        stack.enter_context(socket.create_connection(listener.getsockname()))


def test_how_many_wait_on_a_listener(listener: socket.socket, tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert accept_queue(listener) == 0
        arrive(stack, listener, 7)
        assert accept_queue(listener) == 7
        listener.accept()[0].close()
        assert accept_queue(listener) == 6
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/socket")
        other.listen()
        assert accept_queue(other) == 1, "of one that is no TCP it is taken for one"


@pytest.mark.parametrize(
    ("had", "waiting", "then"), [([0], 30, [30]), ([0, 0, 0], 30, [10, 10, 10]), ([5, 0], 3, [5, 3])]
)
async def test_all_that_wait_are_accepted_in_a_few_turns_by_who_has_fewer_clients(
    listener: socket.socket, had: list[int], waiting: int, then: list[int]
) -> None:
    page = Page(len(had))
    crew = [Worker(page, number) for number in range(len(had))]
    with ExitStack() as stack:
        arrive(stack, listener, waiting)
        for worker, count in zip(crew, had, strict=True):
            worker.clients += [asyncio.Protocol() for _ in range(count)]
            await worker.entrance.open(HERE, [listener.dup()], None, 0)
        for _ in range(FEW_TURNS):
            await asyncio.sleep(0)
        assert [len(worker.clients) for worker in crew] == then
        for worker in crew:
            worker.entrance.close()


# Frames: what is said arrives as it was said, however the bytes are cut.

PLAIN: Any = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
MESSAGES: Any = st.lists(st.lists(PLAIN, min_size=1, max_size=5).map(tuple), min_size=1, max_size=4)
FLEET = Fleet(
    (Cell("c", weight=2.0, spill_s=1.0),),
    (Unit("a", "c", "http://a:1", ("m",), engine="vllm"), Unit("b", "c", "http://b:1", weight=0.5)),
)


@settings(max_examples=40)
@given(st.lists(MESSAGES, max_size=4), st.integers(1, 40))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    frames: list[list[Message]], size: int
) -> None:
    stream, reader = b"".join(map(framed, frames)), Frames()
    cuts = range(0, len(stream), size)
    heard = [message for start in cuts for message in reader.feed(stream[start : start + size])]
    assert heard == [message for frame in frames for message in frame]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1?"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"frame|marshal"):
        list(Frames().feed(data))


@pytest.mark.parametrize("blocks", [(), (0, 7, 2**60 - 1)])
def test_an_ask_a_failure_and_a_fleet_arrive_as_they_were(blocks: tuple[int, ...]) -> None:
    ask = Ask("m", stream=True, prompt_bytes=7, blocks=blocks, deadline_at=inf, continuable=True)
    assert ask_in(ask_out(ask)) == ask
    for failure in (Failure(FailureKind.FULL, "no", retry_after_s=3), Failure(FailureKind.CUT, "x", "p")):
        assert failure_in(failure_out(failure)) == failure
    assert fleet_in(fleet_out(FLEET)) == FLEET
    # Without what only the control process needs.
    unit = Unit("a", "c", "http://a:1", nodes=(Node("n", Role.LEADER),), kv_events=KvEvents("vllm"))
    sent = fleet_out(Fleet(FLEET.cells, (unit,)))
    assert framed([sent])
    assert fleet_in(sent).units == (Unit("a", "c", "http://a:1"),)


@law
@given(body=bodies)
def test_an_ask_of_any_body_goes_to_another_process(body: dict[str, Any]) -> None:
    found = read_ask(orjson.dumps(body))
    if not isinstance(found, Failure):
        assert marshal.loads(marshal.dumps(ask_out(found))) == ask_out(found)


def test_a_bound_that_took_effect_at_a_worker_is_told_once() -> None:
    sent = dict(REACHED)
    for name in ("header_lines", "stop_bytes", "stop_bytes"):
        reached(name)
    assert new_counts(REACHED, sent) == [("header_lines", 1), ("stop_bytes", 2)]
    assert new_counts(REACHED, sent) == []


def test_a_replica_of_a_board_is_told_what_changed_and_nothing_else() -> None:
    board, replica = Board(Rules()), BoardReplica(Rules())
    board.configure(FLEET, 0.0)
    assert replica.take_fleet(1, fleet_out(FLEET), 0.0) == []
    updates = BoardUpdates(board)
    assert replica.take_units(updates.units(0.0)) == []
    assert updates.units(1.0) == []
    board.observe(Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "one token", 2.0))
    board.report(Load("a", 2.0, running=3, waiting=1, kv_use=0.5))
    (told,) = updates.units(2.0)
    assert replica.take_units([told]) == []
    state = replica.board.units["a"]
    assert (state.case.verdict, state.case.since, state.is_usable()) == (Verdict.UP, 2.0, True)
    assert state.load == Load("a", 2.0, running=3, waiting=1, kv_use=0.5)
    assert state.has_room(2.0, 0.0)
    assert state.models == {"m"}
    board.drain("a", drained=True)
    (told,) = updates.units(2.0)
    replica.take_units([told])
    assert not state.is_usable()
    # When a unit last showed life is told apart, for that changes all the time.
    assert updates.lives() == [("a", 2.0), ("b", 0.0)]
    board.units["a"].progress_at = 3.0
    assert (updates.units(3.0), updates.lives()) == ([], [("a", 3.0)])


def test_units_that_have_gone_down_are_told_apart_once_and_those_that_are_not_there_dropped() -> None:
    board, replica, empty = Board(Rules()), BoardReplica(Rules()), BoardReplica(Rules())
    board.configure(FLEET, 0.0)
    replica.take_fleet(1, fleet_out(FLEET), 0.0)
    board.observe(Evidence("a", Sign.BAD, Strength.FATAL, "agent", "gone", 1.0))
    known = BoardUpdates(board).units(1.0)
    assert [state.unit.name for state in replica.take_units(known)] == ["a"]
    assert replica.take_units(known) == []
    assert empty.take_units(known) == []
    assert not empty.board.units


# A worker's session at the control process: which requests it settles, of those that the worker reports.

AT = 1_751_328_000.0
TOKENS = 100
BUSY = Failure(FailureKind.NO_UNIT, "no unit")


class Control:
    """A control process with a key that has 1000 tokens a minute, and one session. It has no unit."""

    def __init__(self, **limits: int) -> None:
        self.bills: list[UsageRecord] = []
        self.ledger = LimitLedger(lambda: AT, KeyCounts(frozenset), lambda bill, _: self.bills.append(bill))
        tenant = TenantRules("t")
        rules = LimitRules(tokens_per_minute=1000, **limits)
        self.ledger.take(KeyRing({b"": Key("k", tenant, limits=rules)}, {"t": tenant}))
        inner: Any = Mock()
        inner.acquire.return_value = BUSY
        asked = LimitedDispatcher(inner, self.ledger)
        self.shared: Any = Mock(dispatcher=inner, asked=asked, ledger=self.ledger, knows_all=True)
        self.session = WorkerSession(self.shared, 0, WorkerTotals(), Mock())
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


def test_a_request_that_was_charged_gets_back_what_it_did_not_use_and_one_that_left_before_nothing() -> None:
    """Its worker cannot know that: it may have been cancelled while leases of all workers were collected."""
    control = Control()
    assert [control.ask(number) for number in range(3)] == [True] * 3
    control.settle(0)
    control.settle(1, used=30)
    assert control.used() == TOKENS + 30
    assert len(control.bills) == 2
    control.shared.knows_all = False
    control.ask(3)
    control.session.hear((ToControl.CANCEL, 3))
    control.settle(3)
    assert control.used() == TOKENS + 30
    assert len(control.bills) == 2


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
    # The record of a request that has ended is whole.
    control.session.hear((ToControl.FINISHED, "chat", 200, "u1", 0.5, 1.5, 10, 20))
    (record,) = control.shared.reports.finished.call_args[0]
    assert record == Finished(*record)
    found = record.route, record.status, record.unit, record.bytes_out, record.rank
    assert found == ("chat", 200, "u1", 20, None)


# Which processes are killed because they stand still, and which are not.


class Scene:
    """A supervisor with a control process and two workers that began at 0 and were alive at NOW."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[int] = []
        monkeypatch.setattr(os, "kill", self._kill)
        settings = Settings(Fleet(), workers=2)
        self.supervisor: Any = Supervisor(settings, lambda: settings, {}, None)
        self.page = self.supervisor._page
        for number in (CONTROL, 0, 1):
            line = socket.socket()
            line.close()
            self.supervisor._children[number] = Child(number, 100 + number, line, 0.0)
            self.page.beat(number, NOW)

    def _kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(pid - 100)

    def look(self, now: float) -> list[int]:
        """Who is killed at that time."""
        self.supervisor._replace_still(now)
        killed, self.killed = self.killed, []
        return killed


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    for each in (scene.supervisor._selector, scene.supervisor._woken, scene.supervisor._waker):
        each.close()


def test_the_control_process_is_given_less_time_than_a_worker_and_each_is_killed_once(scene: Scene) -> None:
    assert scene.look(NOW + CONTROL_STILL_S) == []
    assert scene.look(NOW + CONTROL_STILL_S + 0.1) == [CONTROL]
    assert scene.look(NOW + CONTROL_STILL_S + 0.2) == []
    scene.page.beat(CONTROL, NOW + WORKER_STILL_S)
    scene.page.beat(1, NOW + 1.0)
    assert scene.look(NOW + WORKER_STILL_S + 0.1) == [0]


def test_who_has_only_begun_has_time_to_begin_and_who_is_ending_is_not_looked_at(scene: Scene) -> None:
    scene.page.await_beat(CONTROL)
    for worker in (0, 1):
        scene.page.beat(worker, NOW + 1.0)
    scene.supervisor._children[CONTROL].began_at = NOW
    assert scene.look(NOW + SUPERVISOR_LATE_S) == []
    scene.supervisor._end_by = NOW + 100.0
    assert scene.look(NOW + 99.0) == []
    scene.supervisor._end_by = None
    # After the supervisor was held up itself all have their time anew.
    scene.supervisor._judges_from = NOW + SUPERVISOR_LATE_S + 0.3
    assert scene.look(NOW + SUPERVISOR_LATE_S + 0.2) == []
    assert scene.look(NOW + SUPERVISOR_LATE_S + 0.3) == [CONTROL]
