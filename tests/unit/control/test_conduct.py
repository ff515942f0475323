"""Operations of an engine for an operator: out of rotation first, back only after a proof."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

import pytest

from cellgate.probes.base import Fetch, FetchError, Reply, Trouble
from cellgate.proxy.control.engine_control import ConductError, Conductor, Deed
from cellgate.proxy.control.watches import HoldWatch
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import EnginePause, Evidence, Fleet, HoldKind, Rules, Sign, Strength, Unit
from cellgate.router.unit_state import UnitState

OK = Reply(200, {}, b"{}")


class Stage:
    """A conductor of one unit; `reply` is what its engine answers."""

    def __init__(self, engine: str = "vllm") -> None:
        self.now = 100.0
        self.reply: Reply | FetchError = OK
        self.asked: list[tuple[str, bytes, bool]] = []
        self.looked: list[str] = []
        self.board = Board(Rules())
        self.board.configure(Fleet(units=(Unit("u", "c", "http://u", engine=engine),)), 90.0)
        self.board.observe(Evidence("u", Sign.GOOD, Strength.STRONG, "canary", "token", 95.0))
        events = EventLog(lambda: 0.0, 2, lambda *_: None)
        self.watch = HoldWatch(
            self.board,
            cast("Any", self),
            events,
            lambda: self.now,
            evict=lambda _: None,
            changed=lambda: None,
        )
        self.conductor = Conductor(lambda _: cast(Fetch, self.fetch), self.set_drain, self.watch, 300.0)

    @property
    def state(self) -> UnitState:
        return self.board.units["u"]

    def set_drain(self, unit: str, drained: bool) -> bool:
        return self.board.drain(unit, drained=drained)

    def look_now(self, _unit: str, probe: str) -> None:
        """As the prober has it."""
        self.looked.append(probe)

    def unanswered(self, _probe: str, _for_s: float, _now: float) -> list[str]:
        """As the prober has it."""
        return []

    async def fetch(self, method: str, target: str, *, body: bytes, timeout_s: float) -> Reply:
        assert method == "POST"
        self.asked.append((target, body, self.state.drained))
        if isinstance(self.reply, FetchError):
            raise self.reply
        return self.reply

    def conduct(self, deed: Deed, mode: str = "") -> str:
        return asyncio.run(self.conductor.conduct(self.state, deed, mode))

    def refusal(self, deed: Deed, mode: str = "") -> ConductError:
        with pytest.raises(ConductError) as caught:
            self.conduct(deed, mode)
        return caught.value


@pytest.mark.parametrize(
    ("deed", "path"), [("pause", "/pause?mode=wait"), ("sleep", "/sleep?level=1&mode=wait")]
)
def test_a_unit_is_drained_before_its_engine_stands_still(deed: Deed, path: str) -> None:
    stage = Stage()
    assert stage.conduct(deed) == "wait"
    assert stage.asked == [(path, b"", True)]
    assert stage.looked == ["quiescence"]


@pytest.mark.parametrize(("deed", "path"), [("resume", "/resume"), ("wake", "/wake_up")])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_unit_that_goes_on_has_to_show_work_first(deed: Deed, path: str, is_known: bool) -> None:
    stage = Stage()
    stage.set_drain("u", True)
    if is_known:
        stage.watch.hear(stage.state, EnginePause("u", HoldKind.PAUSED, 99.0))
    stage.conduct(deed)
    assert stage.asked == [(path, b"", True)]
    assert not stage.state.drained
    assert not stage.state.is_usable()
    assert stage.looked[-1] == "canary"
    stage.board.observe(Evidence("u", Sign.GOOD, Strength.STRONG, "canary", "token", 100.5))
    stage.watch.tick(101.0)
    assert stage.state.is_usable()


def test_an_engine_that_refuses_changes_nothing_and_the_error_says_what_to_do() -> None:
    stage = Stage()
    stage.reply = Reply(404, {}, b'{"detail":"Not Found"}')
    refusal = stage.refusal("pause")
    assert refusal.status is HTTPStatus.BAD_GATEWAY
    assert "POST /pause: HTTP 404" in str(refusal)
    assert "VLLM_SERVER_DEV_MODE=1" in str(refusal)
    assert not stage.state.drained


def test_a_unit_whose_engine_does_not_answer_stays_drained() -> None:
    stage = Stage()
    stage.reply = FetchError(Trouble.TIMEOUT, "POST /pause: no reply within 300 s")
    assert "it stays drained" in str(stage.refusal("pause", "keep"))
    assert stage.state.drained


def test_an_unknown_mode_is_refused_before_anything_is_done() -> None:
    stage = Stage("sglang")
    refusal = stage.refusal("pause", "wait")
    assert (refusal.status, stage.asked) == (HTTPStatus.BAD_REQUEST, [])
    assert str(refusal) == "unit u: pause of engine sglang has the modes abort, keep, not 'wait'"
    assert stage.conduct("pause", "keep") == "keep"
    assert stage.asked == [("/pause_generation", b'{"mode":"in_place"}', True)]


def test_an_engine_that_cannot_do_it_is_named() -> None:
    refusal = Stage("llamacpp").refusal("sleep")
    assert refusal.status is HTTPStatus.CONFLICT
    assert "engine llamacpp has no sleep that the gate knows; these have: vllm" in str(refusal)


@pytest.mark.parametrize(("status", "begins"), [(202, True), (200, True), (404, False), (500, False)])
def test_an_engine_with_fault_tolerance_is_asked_to_retry(status: int, begins: bool) -> None:
    stage = Stage()
    stage.reply = Reply(status, {}, b"")
    assert asyncio.run(stage.conductor.retry(stage.state)) is begins
    assert stage.asked == [("/fault_tolerance/apply", b'{"instruction":"retry"}', False)]
    assert not asyncio.run(Stage("llamacpp").conductor.retry(Stage("llamacpp").state))
