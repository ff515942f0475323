"""What HAProxy's agent check and an Application Load Balancer are told of weight."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws

from cellgate.proxy import orchestrators
from cellgate.proxy.config.action_settings import AlbTarget
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.extras.operator.alb import AlbMetrics, AlbWeight, ForeignRuleError, reweighted
from cellgate.proxy.ingress.haproxy import (
    SEEN_S,
    AgentReply,
    Balancers,
    ReplyFormatter,
    ServerState,
    gate_reply,
    unit_reply,
)
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.outliers import Outlier
from tests.aws import REGION, make_balancer, pretend_credentials

LINE = re.compile(rb"up ready ([1-9]\d?|100)% maxconn:[1-9]\d*\n|drain\n|down #[ -~]{0,80}\n")
RULES = Rules(slow_start_s=10.0)
LATE = 100.0
"""Long after slow start."""


def board(*units: Unit) -> Board:
    """Units that are all UP since 0."""
    made = Board(RULES)
    made.configure(Fleet(units=units), 0.0)
    for unit in units:
        tell(made, unit.name, Sign.GOOD)
    return made


def unit(name: str, weight: float = 1.0) -> Unit:
    return Unit(name, "c", f"http://{name}", weight=weight, max_in_flight=32)


def tell(on: Board, name: str, sign: Sign, strength: Strength = Strength.STRONG) -> None:
    on.observe(Evidence(name, sign, strength, "canary", "no token in 2 s", 0.0))


def said(on: Board, name: str, now: float = LATE) -> bytes:
    return ReplyFormatter().line(name, unit_reply(on.units[name], now, on), 1)


def test_a_unit_is_told_as_it_is() -> None:
    """Well, slow, suspected (which comes last, but is in), down, not proven; drained, whatever else is so."""
    here = board(*map(unit, "abcd"))
    here.units["b"].outlier = Outlier(0.4)
    tell(here, "c", Sign.BAD)
    tell(here, "d", Sign.BAD, Strength.FATAL)
    assert [said(here, name) for name in "abcd"] == [
        b"up ready 100% maxconn:32\n",
        b"up ready 60% maxconn:32\n",
        b"up ready 1% maxconn:32\n",
        b"down #down: no token in 2 s (source canary)\n",
    ]
    for name in "ad":
        here.drain(name, drained=True)
        assert said(here, name) == b"drain\n"
    fresh = Board(RULES)
    fresh.configure(Fleet(units=(unit("b"),)), 0.0)
    assert said(fresh, "b") == b"down #starting: no probe has answered yet\n"


def test_a_unit_that_has_just_come_up_gets_more_and_more() -> None:
    here = board(unit("a", weight=2.0))
    assert [said(here, "a", at).split()[2] for at in (0.1, 5.0, 10.0)] == [b"10%", b"50%", b"100%"]


def test_whatever_was_said_the_next_good_word_takes_it_back() -> None:
    """Down ends by `up` alone and drain by `ready` alone, and whoever said them may be gone."""
    here, speaker = board(unit("a")), ReplyFormatter()
    state = here.units["a"]
    for stand in ServerState:
        speaker.line("a", AgentReply(stand), 1)
        assert speaker.line("a", unit_reply(state, LATE, here), 1).startswith(b"up ready ")


def test_the_gate_is_what_its_usable_units_are() -> None:
    here = board(unit("a"), unit("b"), unit("c", weight=2.0))
    assert gate_reply(here, LATE, stopping=False) == AgentReply(ServerState.UP, 100, 96)
    tell(here, "c", Sign.BAD, Strength.FATAL)
    assert gate_reply(here, LATE, stopping=False) == AgentReply(ServerState.UP, 50, 64)
    tell(here, "a", Sign.BAD, Strength.FATAL)
    tell(here, "b", Sign.BAD, Strength.FATAL)
    assert (
        ReplyFormatter().line("gate", gate_reply(here, LATE, stopping=False), 1)
        == b"down #0/3 units usable\n"
    )
    assert gate_reply(here, LATE, stopping=True) == AgentReply(ServerState.DRAIN)


def test_small_changes_are_not_worth_a_word() -> None:
    speaker = ReplyFormatter()
    lines = [
        speaker.line("a", AgentReply(ServerState.UP, percent, 32), 1)
        for percent in (80, 84, 76, 74, 78, 96, 99, 100, 97)
    ]
    assert b" ".join(line.split()[2] for line in lines) == b"80% 80% 80% 74% 74% 96% 96% 100% 100%"


def test_each_load_balancer_gets_its_part_of_the_places() -> None:
    lines = [
        ReplyFormatter().line("a", AgentReply(ServerState.UP, 100, 32), balancers)
        for balancers in (1, 2, 3, 100)
    ]
    assert [int(line.split(b"maxconn:")[1]) for line in lines] == [32, 16, 10, 1]


@given(
    stand=st.sampled_from(ServerState),
    words=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10**6), st.integers(1, 500)), min_size=1),
    reason=st.text(),
)
def test_every_line_is_one_that_haproxy_understands(
    stand: ServerState, words: list[tuple[int, int, int]], reason: str
) -> None:
    speaker = ReplyFormatter()
    for percent, places, balancers in words:
        assert LINE.fullmatch(speaker.line("a", AgentReply(stand, percent, places, reason), balancers))


def test_load_balancers_are_counted_by_address_and_name_and_bounded() -> None:
    seen = Balancers()
    for who in ("10.0.0.1 ", "10.0.0.2 ", "10.0.0.1 ", "10.0.0.2 lb2"):
        seen.asked("gate", who, 0.0)
    assert (seen.count("gate", SEEN_S), seen.count("a", SEEN_S)) == (3, 1)
    assert seen.count("gate", SEEN_S + 0.1) == 1
    seen.asked("b", "10.0.0.1 ", 0.0)
    for number in range(3 * LIMITS.balancers):
        seen.asked("a", f"10.0.0.{number} ", 0.0)
    assert seen.count("a", 0.0) == LIMITS.balancers
    assert seen.count("b", 0.0) == 1


# The weight of a target group at an Application Load Balancer. The API is moto's, asked by boto3.

ROLE = Path(__file__).parents[3] / "deploy" / "ingress" / "alb-role.json"
LATER = 1000.0
"""Long after slow start."""


class Gate:
    """A gate with four units, and what it says at the load balancer."""

    def __init__(self, rule: str, group: str) -> None:
        self.board = Board(Rules(slow_start_s=10.0))
        units = tuple(Unit(f"u{number}", "c", f"http://u{number}") for number in range(4))
        self.board.configure(Fleet(units=units), 0.0)
        self.events = EventLog(lambda: 0.0, 100, lambda *_: None)
        self.stopping = False
        target = AlbTarget(rule, group, region=REGION)
        self.weight = AlbWeight(target, self.board, lambda: LATER, lambda: self.stopping, self.events)

    def units(self, *names: str, are: Sign) -> Gate:
        """These units answer, or are gone; then the gate looks."""
        strength = Strength.STRONG if are is Sign.GOOD else Strength.FATAL
        for name in names:
            self.board.observe(Evidence(name, are, strength, "canary", "refused", 0.0))
        asyncio.run(self.weight.look())
        return self

    def metrics(self) -> dict[str, float]:
        families = AlbMetrics(self.weight).collect()
        return {sample.name: sample.value for family in families for sample in family.samples}


ALL = ("u0", "u1", "u2", "u3")


@mock_aws()
def test_the_weight_follows_what_the_units_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rule and in a default action; with exactly the rights that deploy/ gives."""
    pretend_credentials(monkeypatch)
    balancer, used = make_balancer(), set[str]()
    real = orchestrators.client(orchestrators.ELB, REGION)
    real.meta.events.register(
        "before-call.elastic-load-balancing-v2",
        lambda model, **_: used.add(f"elasticloadbalancing:{model.name}"),
    )
    monkeypatch.setattr("cellgate.proxy.extras.operator.alb.client", lambda *_: real)
    for default, place in ((True, balancer.listener), (False, balancer.rule)):
        Gate(place, balancer.own).units(*ALL, are=Sign.BAD)
        assert balancer.weights(default=default) == [100, 100], "who knows nothing yet changes nothing"
        gate = Gate(place, balancer.own).units(*ALL, are=Sign.GOOD)
        assert balancer.weights(default=default) == [100, 100]
        assert not gate.events.last()
        gate.units("u1", are=Sign.BAD)
        assert balancer.weights(default=default) == [75, 100]
        assert gate.events.last()[-1]["line"].endswith(": 100 -> 75, 3 of 4 units are usable")
        gate.stopping = True
        gate.units("u0", "u2", "u3", are=Sign.BAD)
        assert balancer.weights(default=default) == [75, 100], "nor does who is stopping"
        gate.stopping = False
        gate.units(are=Sign.BAD)
        assert balancer.weights(default=default) == [0, 100]
        assert gate.metrics() == {"cellgate_alb_weight": 0, "cellgate_alb_failures_total": 0}
    policy = json.loads(ROLE.read_text())
    assert used == {action for statement in policy["Statement"] for action in statement["Action"]}
    groups = [{"TargetGroupArn": group, "Weight": 100} for group in (balancer.own, balancer.other)]
    actions = [{"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}]
    balancer.api.modify_rule(RuleArn=balancer.rule, Actions=actions)
    gate.units(are=Sign.GOOD)
    assert balancer.weights() == [0, 100], "what somebody overwrote is set again"
    Gate(balancer.rule, balancer.other).units(*ALL, are=Sign.GOOD).units(*ALL, are=Sign.BAD)
    assert balancer.weights() == [0, 1], "the last group with a weight keeps one"


def test_a_refusal_is_counted_and_the_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def describe_rules(self, **_: object) -> dict[str, Any]:
            groups = [{"TargetGroupArn": group, "Weight": 100} for group in "ab"]
            return {"Rules": [{"Actions": [{"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}]}]}

        def modify_rule(self, **_: object) -> None:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "ModifyRule")

    said: list[str] = []
    monkeypatch.setattr("cellgate.proxy.extras.operator.alb.log_line", lambda _level, line: said.append(line))
    monkeypatch.setattr("cellgate.proxy.extras.operator.alb.client", lambda *_: Refusing())
    gate = Gate("rule", "a").units(*ALL, are=Sign.GOOD).units("u1", are=Sign.BAD)
    gate.units("u2", are=Sign.BAD)
    assert gate.metrics() == {"cellgate_alb_weight": 100, "cellgate_alb_failures_total": 2}
    [line] = said
    assert "allow elasticloadbalancing:ModifyRule" in line
    assert "the weight stays as it is" in line


def test_other_actions_and_stickiness_stay() -> None:
    login = {"Type": "authenticate-oidc", "Order": 1}
    forward = {
        "Type": "forward",
        "Order": 2,
        "ForwardConfig": {
            "TargetGroups": [{"TargetGroupArn": "a", "Weight": 100}, {"TargetGroupArn": "b", "Weight": 7}],
            "TargetGroupStickinessConfig": {"Enabled": True, "DurationSeconds": 60},
        },
    }
    done = reweighted([login, forward], "a", 40, 100)
    assert done.actions[0] is login
    assert done.actions[1]["Order"] == 2
    config = done.actions[1]["ForwardConfig"]
    assert config["TargetGroupStickinessConfig"] == {"Enabled": True, "DurationSeconds": 60}
    assert config["TargetGroups"] == [
        {"TargetGroupArn": "a", "Weight": 40},
        {"TargetGroupArn": "b", "Weight": 7},
    ]
    with pytest.raises(ForeignRuleError, match="does not forward to c"):
        reweighted([login, forward], "c", 40, 100)


@pytest.mark.parametrize(
    ("before", "wanted", "after"), [(97, 95, 97), (97, 100, 100), (50, 60, 60), (2, 0, 0), (0, 3, 3)]
)
def test_small_changes_are_not_worth_a_call(before: int, wanted: int, after: int) -> None:
    groups = [{"TargetGroupArn": "a", "Weight": before}, {"TargetGroupArn": "b", "Weight": 100}]
    action = {"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}
    assert reweighted([action], "a", wanted, 100).after == after
