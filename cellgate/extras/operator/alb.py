"""Sets the weight of this gate's target group at AWS's Application Load Balancer by what its units can do.

A load balancer sends a target group its share even when no target in it is healthy, so a cell that has lost
all its units must lose its weight.

1. Only this gate's own group is changed, and the rule is read before each change. Several gates change one
   rule: where one overwrites another's change, the next look puts that right.
2. The weight becomes 0 only after this gate has had a usable unit: one that has just started knows nothing.
   A gate that is stopping leaves it alone: others may serve the group.
3. Without the API the weight stays as it is, which is said once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import Metric

from cellgate.extras.operator.action_settings import AlbTarget
from cellgate.extras.orchestrators import ELB, AwsError, client, said_plainly
from cellgate.proxy.ingress.haproxy import STEADY, AgentReply, ServerState, gate_reply
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.families import one_counter, one_gauge
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.tasks import end_tasks
from cellgate.router.board import Board


class AlbWeight:
    """The weight of one target group. `start` begins, `close` ends.

    `weight` is the last one that was seen or set (None: none yet); `failures` counts looks and changes that
    failed.
    """

    def __init__(
        self,
        target: AlbTarget,
        board: Board,
        now: Callable[[], float],
        is_stopping: Callable[[], bool],
        events: EventLog,
    ) -> None:
        self._target = target
        self._board = board
        self._now = now
        self._is_stopping = is_stopping
        self._events = events
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._was_usable = False
        self.weight: int | None = None
        self.failures = 0
        self._is_failing = False

    def start(self) -> None:
        """Begin, and run until `close`. Needs a running loop."""
        self._task = asyncio.create_task(self._forever(), name="weight at the load balancer")

    async def close(self) -> None:
        """End; the weight stays."""
        if self._task is not None:
            await end_tasks(self._task)

    async def _forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(ALB_PERIOD_S)

    async def look(self) -> None:
        """Compare the weight, and change it if it is another one. Never raises."""
        if self._is_stopping():
            return
        reply = gate_reply(self._board, self._now(), stopping=False)
        wanted = wanted_weight(reply, self._target.weight)
        self._was_usable = self._was_usable or wanted > 0
        if not self._was_usable:
            return
        try:
            done = await asyncio.to_thread(self._bring, wanted)
        except (AwsError, ForeignRuleError) as error:
            self._fail(str(error))
        except Exception as error:  # Whatever an API answers, this task has to go on.
            self._fail(repr(error))
        else:
            self._is_failing, self.weight = False, done.after
            if done.actions:
                usable = sum(state.is_usable() for state in self._board)
                detail = (
                    f"{done.before} -> {done.after}, {usable} of {len(self._board.units)} units are usable"
                )
                self._events.add(Action("alb_weight", "gate", detail=detail))

    def _fail(self, reason: str) -> None:
        self.failures += 1
        if not self._is_failing:
            self._is_failing = True
            log_line(
                "warning", f"alb: {reason}; the weight stays as it is, tried again every {ALB_PERIOD_S:g} s"
            )

    def _bring(self, wanted: int) -> Reweighted:
        """Read the rule, and write it if the weight is another one. In a thread."""
        rule, target = self._target.rule, self._target
        if self._client is None:
            self._client = client(ELB, target.region)
        is_listener = ":listener/" in rule
        with said_plainly(ELB):
            if is_listener:
                [found] = self._client.describe_listeners(ListenerArns=[rule])["Listeners"]
            else:
                [found] = self._client.describe_rules(RuleArns=[rule])["Rules"]
            actions = found["DefaultActions" if is_listener else "Actions"]
            done = reweighted(actions, target.target_group, wanted, target.weight)
            if done.actions and is_listener:
                self._client.modify_listener(ListenerArn=rule, DefaultActions=done.actions)
            elif done.actions:
                self._client.modify_rule(RuleArn=rule, Actions=done.actions)
        return done


def alb_metrics(alb: AlbWeight) -> Iterator[Metric]:
    """The weight of this gate's target group at a load balancer of AWS."""
    if alb.weight is not None:
        text = "The weight of this gate's target group at the load balancer, as last seen or set."
        yield one_gauge("alb_weight", text, alb.weight)
    text = "Looks at the load balancer's rule, or changes of it, that failed."
    yield one_counter("alb_failures", text, alb.failures)


# The actions of a rule of AWS's Application Load Balancer, with another weight of one target group. Pure.


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


ALB_PERIOD_S = 10.0
"""How often the weight is compared with what it should be."""
