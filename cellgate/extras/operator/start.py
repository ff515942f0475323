"""The operator: all that acts on units and load balancers by itself. Imported where its file is named.

In this order: `Operator`, `operate`, `roll_page`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

from cellgate.extras.operator.actions import action_runner
from cellgate.extras.operator.alb import AlbWeight, alb_metrics
from cellgate.extras.operator.plan import Acting, Alone
from cellgate.extras.operator.recovery import attend
from cellgate.extras.operator.roll_plan import Order, OrderError, OwnRoll, RollStore, verb_of
from cellgate.extras.operator.roller import Roller, roll_units
from cellgate.proxy.admin.http import error_reply, reply
from cellgate.proxy.ingress.reports import as_json

if TYPE_CHECKING:
    from cellgate.extras.operator.action_settings import Remedy
    from cellgate.proxy.admin.pages import PageHandler
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
        self.roller: Roller | None = None
        if settings.roll is not None:
            self.roller = roll_units(plane, settings.roll, rolls, run_action)
        self._recovery = attend(plane, run_action, acting)
        self._alb: AlbWeight | None = None
        if settings.alb is not None:
            self._alb = AlbWeight(settings.alb, plane.board, plane.now, plane.is_stopping, plane.events)
            plane.metrics.include(partial(alb_metrics, self._alb))

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

    def carry_on(self) -> None:
        """There is no successor."""
        self._recovery.carry_on()

    def roll(self) -> dict[str, Any] | None:
        """The roll under way, or the last one, for people."""
        return self.roller.shown() if self.roller is not None else None

    def pages(self) -> Mapping[str, PageHandler]:
        """What answers on the admin port, by path."""
        if self.roller is None:
            return {}
        return {"/roll": partial(roll_page, self.roller), "/roll/{name}": partial(order_roll, self.roller)}

    async def close(self) -> None:
        """End every part."""
        if self.roller is not None:
            await self.roller.close()
        await self._recovery.close()
        if self._alb is not None:
            await self._alb.close()


def operate(plane: Plane, gate: str, tls: Callable[[], ssl.SSLContext]) -> Operator:
    """The operator of this gate."""
    agreed = None
    if plane.settings.redis is not None:
        # Imported late: the client takes a quarter of a second and ten megabytes.
        from cellgate.extras.operator.agreement import agree

        agreed = agree(plane, plane.settings.redis, gate)
    return Operator(plane, gate, tls, agreed)


def _acting(plane: Plane, gate: str) -> Acting:
    if plane.settings.leases is None:
        return Alone()
    # Imported late, because it brings an HTTP client.
    from cellgate.extras.operator.leases import agree_by_leases

    return agree_by_leases(plane, plane.settings.leases, gate)


# Rolls by the admin port: what is under way, and what is asked of it.


async def roll_page(roller: Roller, _request: web.BaseRequest, _name: str) -> web.Response:
    """The roll under way, or the last one."""
    return reply(as_json({"roll": roller.shown()}))


async def order_roll(roller: Roller, request: web.BaseRequest, verb: str) -> web.Response:
    """Ask for it; the gate that conducts does it within a second or two."""
    query = request.query
    cells = tuple(cell for cell in query.get("cells", "").split(",") if cell)
    try:
        order = Order(
            verb_of(verb), request.remote or "?", cells, query.get("version", ""), query.get("dry_run") == "1"
        )
        await roller.order(order)
    except OrderError as error:
        return error_reply(HTTPStatus.CONFLICT, str(error))
    return reply(as_json({"asked": verb}), HTTPStatus.ACCEPTED)
