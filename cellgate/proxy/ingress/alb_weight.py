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
from collections.abc import Callable
from typing import Any

from cellgate.proxy.config.alb import AlbTarget
from cellgate.proxy.ingress.alb_rule import ForeignRuleError, Reweighted, reweighted, wanted_weight
from cellgate.proxy.ingress.haproxy_words import gate_reply
from cellgate.proxy.logs.events import Action, EventLog
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.orchestrators.aws import ELB, AwsError, client, told_plainly
from cellgate.router.board import Board

PERIOD_S = 10.0
"""How often the weight is compared with what it should be."""


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
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

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
            log_line("warning", f"alb: {reason}; the weight stays as it is, tried again every {PERIOD_S:g} s")

    def _bring(self, wanted: int) -> Reweighted:
        """Read the rule, and write it if the weight is another one. In a thread."""
        rule, target = self._target.rule, self._target
        if self._client is None:
            self._client = client(ELB, target.region)
        is_listener = ":listener/" in rule
        with told_plainly(ELB):
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
