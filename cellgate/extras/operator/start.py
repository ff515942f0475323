"""All that acts on units and load balancers by itself. Imported where the operator's file is named."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cellgate.extras.operator.actions import action_runner
from cellgate.extras.operator.alb import AlbMetrics, AlbWeight
from cellgate.extras.operator.plan import Acting, Alone
from cellgate.extras.operator.recovery import attend
from cellgate.extras.operator.roll_plan import OwnRoll, RollStore
from cellgate.extras.operator.roller import roll_units

if TYPE_CHECKING:
    from cellgate.proxy.config.action_settings import Remedy
    from cellgate.proxy.control.plane import Plane


class Operator:
    """Recovery, rolls, and the gate's weight at a load balancer of AWS; `roller` is None without rolls.

    `acting` and `rolls` are what gates agree on; None: this one is alone, or agrees by Leases.
    `tls` makes the context that verifies webhooks.
    """

    def __init__(
        self,
        plane: Plane,
        gate: str,
        tls: Callable[[], ssl.SSLContext],
        agreed: tuple[Acting, RollStore] | None,
    ) -> None:
        settings = plane.settings
        acting, rolls = agreed or (_acting(plane, gate), OwnRoll())
        run_action = action_runner(tls)
        self.roller = None
        if settings.roll is not None:
            self.roller = roll_units(plane, settings.roll, rolls, run_action)
        self._recovery = attend(plane, run_action, acting)
        self._alb: AlbWeight | None = None
        if settings.alb is not None:
            self._alb = AlbWeight(settings.alb, plane.board, plane.now, plane.is_stopping, plane.events)
            plane.metrics.include(AlbMetrics(self._alb))

    def start(self, courses: Mapping[str, Any] | None) -> None:
        """Needs a running loop. `courses` are the recoveries that were under way at the previous gate."""
        if courses is not None:
            self._recovery.take_over(courses)
        if self._alb is not None:
            self._alb.start()

    def configure(self, remedies: Mapping[str, Remedy]) -> None:
        """The file was read again."""
        self._recovery.configure(remedies)

    def hand_over(self) -> Any:
        """The recoveries under way, for a successor; none begins any more."""
        return self._recovery.hand_over()

    def go_on(self) -> None:
        """There is no successor."""
        self._recovery.go_on()

    async def close(self) -> None:
        """End every part."""
        if self.roller is not None:
            await self.roller.close()
        await self._recovery.close()
        if self._alb is not None:
            await self._alb.close()


def _acting(plane: Plane, gate: str) -> Acting:
    if plane.settings.leases is None:
        return Alone()
    # Imported late, because it brings an HTTP client.
    from cellgate.extras.operator.leases import agree_by_leases

    return agree_by_leases(plane, plane.settings.leases, gate)
