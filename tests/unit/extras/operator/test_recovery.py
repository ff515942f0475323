"""Recovery as a whole, in one gate and in several, with deeds, a log and a clock of the test's own."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import pytest

from cellgate.extras.operator.action_settings import Remedy, RunCommand
from cellgate.extras.operator.plan import (
    Acting,
    Alone,
    Claim,
    Incident,
    NotActingError,
    RecoveryReport,
    RecoveryResult,
)
from cellgate.extras.operator.recovery import Recovery, RecoveryPorts, reason_to_wait
from cellgate.proxy.observe.events import Action
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Evidence, Fleet, Node, Place, Role, Rules, Sign, Strength, Unit
from cellgate.router.unit_state import UnitState

REMEDY = Remedy("audit.jsonl", RunCommand(("recover", "--now")), after_s=10.0, attempts=2, backoff_s=100.0)
ALONE = Alone()
DONE = RecoveryReport(RecoveryResult.OK, "it exited with 0", "bye")


class Ward:
    """A cell of units that are UP, its recovery, and all that came of it."""

    def __init__(
        self, units: int = 1, remedy: Remedy = REMEDY, acting: Acting = ALONE, *, place: Place = ()
    ) -> None:
        self.now = 100.0
        self.board = Board(Rules())
        nodes = (Node("n0", Role.LEADER, place=place), Node("n1", Role.FOLLOWER))
        names = "abcdef"[:units]
        fleet = Fleet((Cell("c"),), tuple(Unit(n, "c", f"http://{n}", nodes=nodes) for n in names))
        self.board.configure(fleet, self.now)
        self.waits = ""
        self.entries: list[Mapping[str, Any]] = []
        self.deeds: list[Incident] = []
        self.told: list[Action] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.report = DONE
        self.acting = acting
        self.disk: OSError | None = None
        self.on_record: Callable[[], object] = lambda: None
        self.deed: Callable[[], Coroutine[Any, Any, None]] = _nothing
        ports = RecoveryPorts(
            lambda: self.now,
            lambda: 1e9 + self.now,
            lambda _: self.waits,
            self.act,
            self.record,
            self.told.append,
            self.retry,
            self.acting,
        )
        self.recovery = Recovery(self.board, {"c": remedy}, ports, random.Random(1), self.counts)
        for name in names:
            self.say(name, Sign.GOOD, Strength.STRONG)
        self.recovery.tick(self.now)

    async def retry(self, _state: UnitState) -> bool:
        return False

    async def act(self, remedy: Remedy, about: Incident) -> RecoveryReport:
        self.deeds.append(about)
        await self.deed()
        return self.report

    async def record(self, path: str, entry: Mapping[str, Any]) -> None:
        assert path == "audit.jsonl"
        self.on_record()
        if self.disk is not None:
            raise self.disk
        self.entries.append(entry)

    def say(self, name: str, sign: Sign, strength: Strength, source: str = "canary") -> None:
        self.board.observe(Evidence(name, sign, strength, source, "so it is", self.now, "e1", None))

    def fall(self, *names: str) -> None:
        for name in names:
            self.say(name, Sign.BAD, Strength.FATAL)

    def rise(self, name: str) -> None:
        for _ in range(2):
            self.say(name, Sign.GOOD, Strength.STRONG)

    async def wait(self, wait_s: float) -> None:
        self.now += wait_s
        self.recovery.tick(self.now)
        for _ in range(10):
            await asyncio.sleep(0)

    async def down(self, wait_s: float = 10.0) -> None:
        """Unit a falls, and stays so for this long."""
        self.fall("a")
        await self.wait(wait_s)

    @property
    def kinds(self) -> list[str]:
        return [action.kind for action in self.told]

    @property
    def results(self) -> dict[str, int]:
        return {result: n for (_, result), n in self.counts.items() if n}


async def _nothing() -> None: ...


class Agreed:
    """What gates have agreed on, as a test says it."""

    def __init__(self) -> None:
        self.trouble = ""
        self.acts = True
        self.refusal = ""
        self.standing = set[str]()
        self.heard: list[Claim] = []
        self.claims: list[Claim] = []
        self.withdrawn: list[Claim] = []
        self.on_claim: Callable[[], object] = lambda: None

    def stand_for(self, cells: Collection[str]) -> None:
        self.standing = set(cells)

    def acts_for(self, _cell: str) -> bool:
        return self.acts

    def news(self) -> list[Claim]:
        news, self.heard = self.heard, []
        return news

    async def claim(self, claim: Claim) -> int:
        if self.refusal:
            raise NotActingError(self.refusal)
        self.claims.append(claim)
        self.on_claim()
        return 42

    async def withdraw(self, claim: Claim) -> None:
        self.withdrawn.append(claim)

    async def close(self) -> None: ...


async def test_a_deed_is_in_the_log_before_and_after_it() -> None:
    ward = Ward()
    ward.fall("a")
    await ward.wait(9.0)
    assert not ward.entries
    await ward.wait(1.0)
    begin, end = ward.entries
    (about,) = ward.deeds
    assert (begin["step"], begin["command"], begin["case"]) == ("begin", ["recover", "--now"], about)
    assert (end["step"], end["result"], end["output"], end["took_s"]) == ("end", "ok", "bye", 0.0)
    assert begin["id"] == end["id"] == about["id"]
    assert (about["unit"], about["down_s"], about["attempt"], about["reason"]) == ("a", 10.0, 1, "so it is")
    assert [node["name"] for node in about["nodes"]] == ["n0", "n1"]
    assert about["epoch"] == {"canary": "e1"}
    assert about["since"] == "2001-09-09T01:48:20.000Z"
    assert about["evidence"][-1]["strength"] == "fatal"
    assert ward.kinds == ["recovery", "recovery_done"]
    assert ward.results == {"ok": 1}
    assert "recover --now for nodes n0, n1; attempt 1 of 2, DOWN for 10 s" in ward.told[0].detail


async def test_it_gives_up_loudly_and_on_record() -> None:
    ward = Ward()
    ward.report = RecoveryReport(RecoveryResult.FAILED, "it ended with 1")
    ward.fall("a")
    for _ in range(400):
        await ward.wait(1.0)
    assert ward.results == {"failed": 2, "gave_up": 1}
    assert ward.kinds == ["recovery", "recovery_failed"] * 2 + ["recovery_gave_up"]
    assert ward.entries[-1]["result"] == "gave_up"
    assert ward.entries[-1]["case"]["unit"] == "a"


async def test_units_that_are_down_with_all_others_under_a_switch_are_left_alone_for_longer() -> None:
    ward = Ward(2, place=("zone-a", "leaf-1"))
    ward.fall("a", "b")
    await ward.wait(99.0)
    assert not ward.deeds
    ward.rise("b")
    await ward.wait(0.5)
    await ward.wait(0.5)
    assert [about["unit"] for about in ward.deeds] == ["a"]


DELETED = Evidence("a", Sign.BAD, Strength.FATAL, "lws", "its pod is being deleted", 0.0, node="n1")
MEANWHILE: dict[str, Callable[[Ward], object]] = {
    "the unit is up": lambda ward: ward.rise("a"),
    "the gate is in panic": lambda ward: setattr(ward, "waits", "the gate is in panic"),
    "being deleted": lambda ward: ward.board.observe(DELETED),
    "drained": lambda ward: ward.board.drain("a", drained=True),
    "taken out of the configuration": lambda ward: ward.board.configure(Fleet(), 0.0),
}


@pytest.mark.parametrize("why", MEANWHILE)
async def test_what_changes_while_the_log_is_written_cancels_what_was_decided(why: str) -> None:
    ward = Ward()
    ward.on_record = lambda: MEANWHILE[why](ward)
    await ward.down()
    assert not ward.deeds
    assert ward.results == {"cancelled": 1}
    if why.startswith("the unit"):
        assert ward.entries[-1]["detail"] == f"{why}; nothing was done"


@pytest.mark.parametrize(
    "why", ["the gate is in panic", "Redis cannot be asked which gate acts: ConnectionError"]
)
async def test_a_gate_that_may_not_act_does_not_and_says_so_once(why: str) -> None:
    """Nor do gates that cannot agree. One that may not lets another one."""
    ward = Ward(acting=(agreed := Agreed()))
    assert agreed.standing == {"c"}
    ward.fall("a")
    if "gate acts" in why:
        agreed.acts, agreed.trouble = False, why
    else:
        ward.waits = why
    for _ in range(30):
        await ward.wait(1.0)
    assert not ward.deeds
    assert [(action.kind, action.detail) for action in ward.told] == [
        ("recovery_held", f"{why}; nothing is done about a")
    ]
    assert bool(agreed.standing) is not bool(ward.waits)


async def test_a_dry_run_does_all_but_the_deed_and_without_a_log_nothing_is_done() -> None:
    ward = Ward(remedy=Remedy("audit.jsonl", RunCommand(("recover",)), after_s=10.0, dry_run=True))
    await ward.down()
    assert (ward.deeds, ward.results) == ([], {"dry_run": 1})
    assert ward.kinds == ["recovery", "recovery_done"]
    assert [entry["step"] for entry in ward.entries] == ["begin", "end"]
    ward = Ward()
    ward.disk = OSError(28, "No space left on device")
    await ward.down()
    assert (ward.deeds, ward.results) == ([], {"unrecorded": 1})
    assert ward.kinds == ["recovery_failed", "recovery_unrecorded"]
    assert "No space left on device; nothing was done" in ward.told[0].detail


async def test_an_attempt_that_the_gate_does_not_live_to_see_is_recorded_as_that() -> None:
    """A fault of its own is a failed attempt."""
    ward = Ward()
    ward.deed = asyncio.Event().wait  # type: ignore[assignment]
    await ward.down()
    await ward.recovery.close()
    assert ward.entries[-1]["result"] == "cut_off"
    ward.rise("a")
    await ward.wait(1.0)
    await ward.down(500.0)
    assert len(ward.deeds) == 1

    async def bug() -> None:
        raise KeyError("bug")

    ward = Ward()
    ward.deed = bug
    await ward.down()
    assert ward.results == {"failed": 1}
    assert "the gate's own fault: KeyError('bug')" in ward.told[-1].detail


async def test_another_remedy_counts_from_the_next_look_on() -> None:
    """Without a successor after all it goes on."""
    ward = Ward()
    ward.recovery.configure({})
    await ward.down(50.0)
    assert not ward.deeds
    ward.recovery.configure({"c": REMEDY})
    await ward.wait(0.0)
    assert len(ward.deeds) == 1
    ward = Ward()
    ward.recovery.hand_over()
    await ward.down(50.0)
    assert not ward.deeds
    ward.recovery.carry_on()
    await ward.wait(9.0)
    await ward.wait(2.0)
    assert len(ward.deeds) == 1


async def test_a_successor_knows_what_was_tried_and_the_one_before_begins_nothing_more() -> None:
    old, new = Ward(), Ward()
    for ward in (old, new):
        ward.fall("a")
    old.deed = asyncio.Event().wait  # type: ignore[assignment]
    await old.wait(10.0)
    new.now = old.now
    new.recovery.take_over(json.loads(json.dumps(old.recovery.hand_over())))
    await new.wait(99.0)
    assert not new.deeds, "the first attempt may still be at work"
    await new.wait(1.0)
    assert [about["attempt"] for about in new.deeds] == [2]
    old.rise("a")
    await old.wait(1.0)
    old.fall("a")
    await old.wait(500.0)
    assert len(old.deeds) == 1
    await old.recovery.close()


# When it may not act.


@pytest.mark.parametrize(
    ("units", "answering", "is_cut_off"),
    [(1, "", False), (2, "", True), (2, "a", False), (5, "ab", True), (5, "abc", False), (4, "ab", False)],
)
def test_who_hears_nothing_of_most_units_may_be_cut_off_itself(
    units: int, answering: str, is_cut_off: bool
) -> None:
    """Nor does it act when it stops, panics or has troubles of its own."""
    ward = Ward(units)
    for state in ward.board:
        state.answered_at = ward.now if state.unit.name in answering else ward.now - 60.0
        state.progress_at = 0.0

    def why(stopping: bool = False, gate_fault: bool = False) -> str:
        return reason_to_wait(ward.board, ward.now, stopping=stopping, gate_fault=gate_fault)

    assert bool(why()) is is_cut_off
    assert ("may be cut off" in why()) is is_cut_off
    assert why(stopping=True) == "the gate is stopping"
    if not is_cut_off:
        assert why(gate_fault=True) == "the gate cannot open connections of its own"
        ward.board.panic_at = 1.0
        assert why() == "the gate is in panic"


# Recovery in several gates, with an agreement of the test's own on who acts.


@pytest.mark.parametrize("comes_back", [False, True])
async def test_an_attempt_is_claimed_and_its_command_gets_the_fencing_token(*, comes_back: bool) -> None:
    """The claim is withdrawn when the unit came back meanwhile."""
    ward = Ward(acting=(agreed := Agreed()))
    if comes_back:
        agreed.on_claim = lambda: ward.rise("a")
    await ward.down()
    (claim,) = agreed.claims
    assert (claim.unit, claim.cell, claim.attempt, claim.rest_s) == ("a", "c", 1, 130.0)
    deeds = [(about["id"], about["fence"]) for about in ward.deeds]
    assert (deeds, agreed.withdrawn) == (([], [claim]) if comes_back else ([(claim.id, 42)], []))


async def test_a_refused_claim_counts_for_nothing_and_the_attempt_of_another_gate_is_given_its_time() -> None:
    ward = Ward(acting=(agreed := Agreed()))
    agreed.refusal = "gate g2 acts for the cell"
    await ward.down()
    assert (ward.deeds, ward.results) == ([], {"cancelled": 1})
    assert ward.entries[-1]["detail"] == "gate g2 acts for the cell; nothing was done"
    agreed.refusal = ""
    await ward.wait(1.0)
    assert [about["attempt"] for about in ward.deeds] == [1]
    ward = Ward(acting=(agreed := Agreed()))
    agreed.acts = False
    await ward.down()
    agreed.heard = [Claim("a", "c", "g2", "a-1", attempt=1, rest_s=130.0)]
    await ward.wait(1.0)
    agreed.acts = True
    await ward.wait(129.0)
    assert not ward.deeds
    await ward.wait(2.0)
    assert [about["attempt"] for about in ward.deeds] == [2]
