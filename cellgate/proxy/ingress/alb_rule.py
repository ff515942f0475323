"""The actions of a rule of AWS's Application Load Balancer, with another weight of one target group. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cellgate.proxy.ingress.haproxy_words import STEADY, AgentReply, ServerState

RuleAction = Mapping[str, Any]
"""An action of a rule as DescribeRules has it."""


class Reweighted(NamedTuple):
    """A target group's weight before and after, and the actions with the new one; empty: it stays."""

    before: int
    after: int
    actions: list[RuleAction]


class ForeignRuleError(Exception):
    """The rule does not forward to the target group."""


def wanted_weight(reply: AgentReply, whole: int) -> int:
    """The weight of a gate that can do what `reply` says, where `whole` is that of one with all its units."""
    if reply.state is not ServerState.UP:
        return 0
    return max(1, round(whole * reply.percent / 100))


def reweighted(actions: Sequence[RuleAction], group: str, wanted: int, whole: int) -> Reweighted:
    """The actions in which `group` has the weight `wanted`, unless it has nearly that.

    A load balancer answers 503 when all weights are 0. So the last group that has a weight keeps 1. Raises
    ForeignRuleError.
    """
    forward = next((action for action in actions if _weight_of(action, group) is not None), None)
    if forward is None:
        raise ForeignRuleError(f"the rule does not forward to {group}")
    before = _weight_of(forward, group) or 0
    groups = forward["ForwardConfig"]["TargetGroups"]
    if not wanted and not any(each["TargetGroupArn"] != group and _weight(each) for each in groups):
        wanted = 1
    is_near = abs(before - wanted) <= STEADY * whole and wanted not in (0, whole) and before > 0
    if before == wanted or is_near:
        return Reweighted(before, before, [])
    changed = [each | {"Weight": wanted} if each["TargetGroupArn"] == group else each for each in groups]
    config = {**forward["ForwardConfig"], "TargetGroups": changed}
    new = {name: value for name, value in forward.items() if name != "TargetGroupArn"}
    new["ForwardConfig"] = config
    return Reweighted(before, wanted, [new if action is forward else action for action in actions])


def _weight_of(action: RuleAction, group: str) -> int | None:
    """The weight of a target group in an action; None: the action does not forward to it."""
    groups = action.get("ForwardConfig", {}).get("TargetGroups", ())
    return next((_weight(each) for each in groups if each["TargetGroupArn"] == group), None)


def _weight(group: Mapping[str, Any]) -> int:
    """As AWS documents it, one that is alone needs none."""
    return int(group.get("Weight", 1))
