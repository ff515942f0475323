"""The fleet router: keeps a gate's fleet and its verdicts to what other gates publish in Redis.

1. Without Redis the last fleet is kept. A gate whose reports are missing is probed at its /readyz before its
   units count as gone.
2. Nothing here waits for Redis, and no request waits for this module.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cellgate.probes.base import FetchError
from cellgate.proxy.discovery.redis import Feed
from cellgate.proxy.sharing.fleet_evidence import FleetEvidence, is_own_finding
from cellgate.proxy.sharing.fleet_units import FleetUnit, FleetUnits, found
from cellgate.proxy.sharing.roster import Roster
from cellgate.proxy.sharing.unit_report import Seen
from cellgate.router.flip import Flip
from cellgate.router.nouns import Strength, Verdict

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane

CHECK_S = 0.5
READY_S = 1.0
"""The timeout of a gate's /readyz, which it answers from memory."""


class FleetRouter:
    """For a gate whose units belong to other gates. The gate calls `tick` and `heard`."""

    def __init__(self, plane: Plane, roster: Roster, feed: Feed) -> None:
        self._plane = plane
        self._roster = roster
        self._feed = feed
        self._units = FleetUnits(roster)
        self._evidence = FleetEvidence(
            plane.board, plane.prober.observe, plane.set_drain, plane.events.add, plane.hold_watch.hear
        )
        self._sights: dict[str, FleetUnit] = {}
        self._is_due = False
        self._check_at = 0.0
        self._checking: asyncio.Task[None] | None = None
        feed.on_taken = self._apply_all

    def heard(self, _: Seen) -> None:
        """A verdict of another gate has changed: apply all changes of this turn at once."""
        self._tick_soon()

    def flipped(self, flip: Flip) -> None:
        """A verdict has changed here: a unit whose gate refuses may have another gate."""
        if flip.after is Verdict.DOWN:
            self._tick_soon()

    def _tick_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(lambda: self.tick(self._plane.now()))

    def tick(self, now: float) -> None:
        """Take over what is known now."""
        self._is_due = False
        self._note_refusals()
        self._sights = self._units.refresh(now)
        self._feed.put(found(self._sights.values()))
        self._evidence.keep(set(self._sights))
        self._apply_all()
        if now >= self._check_at and (self._checking is None or self._checking.done()):
            self._check_at = now + CHECK_S
            self._checking = asyncio.get_running_loop().create_task(self._check(), name="gates of the fleet")

    def _apply_all(self) -> None:
        now = self._plane.now()
        for fleet_unit in self._sights.values():
            self._evidence.take(fleet_unit, now)

    def _note_refusals(self) -> None:
        """A gate that refuses connections is gone; its units may have another one."""
        for state in self._plane.board:
            if state.case.verdict is Verdict.DOWN and is_own_finding(state.case, Strength.FATAL):
                self._units.lost.add(state.unit.url)

    # -- asking gates --------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Check the readiness of gates that are missing or have refused a request."""
        now, missed = self._plane.now(), self._roster.missed(self._plane.now())
        restarted = self._units.restarted(missed)
        self._roster.not_ready(restarted, now)
        missed -= restarted
        urls = {report.gate_url for (_, name), report, _ in self._roster.everything() if name in missed}
        asked = sorted(urls | self._units.lost)
        answers = dict(zip(asked, await asyncio.gather(*map(self._is_ready, asked)), strict=True))
        self._units.lost -= {url for url, is_ready in answers.items() if is_ready}
        told = self._roster.everything()
        gone = {gate for (_, gate), report, _ in told if not answers.get(report.gate_url, True)}
        self._roster.not_ready(gone & missed, self._plane.now())

    async def _is_ready(self, url: str) -> bool:
        """Whether the gate at a URL is ready."""
        try:
            reply = await self._plane.reach.net().fetch(url)("GET", "/readyz", timeout_s=READY_S)
        except FetchError:
            return False
        return reply.status == 200
