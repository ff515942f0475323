"""The weight of a gate at a load balancer of AWS, as its API is used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from moto import mock_aws

from cellgate.extras import orchestrators
from cellgate.extras.operator.action_settings import AlbTarget
from cellgate.extras.operator.alb import AlbWeight, ForeignRuleError, alb_metrics, reweighted
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit
from tests.aws import REGION, make_balancer, pretend_credentials

# The weight of a target group at an Application Load Balancer. The API is moto's, asked by boto3.

ROLE = Path(__file__).parents[4] / "deploy" / "ingress" / "alb-role.json"
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
        families = alb_metrics(self.weight)
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
    monkeypatch.setattr("cellgate.extras.operator.alb.client", lambda *_: real)
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
    monkeypatch.setattr("cellgate.extras.operator.alb.log_line", lambda _level, line: said.append(line))
    monkeypatch.setattr("cellgate.extras.operator.alb.client", lambda *_: Refusing())
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
