"""The runner: lets one probe look at one unit, again and again, for as long as the unit is watched.

1. Looks never overlap. A nudge makes the next look now, or right after the one that is on its way.
2. Nothing a probe does, or whoever takes its findings, ends the task: an exception in a look is a logged line
   and neutral evidence. One in `due_at` is logged once, and the probe looks every second.
3. Time is the loop's, randomness is injected. No look is later than its probe says.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable

from cellgate.probes.base import Probe, ProbeContext
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

JITTER = 0.1
"""Each pause is shortened by up to this share, so that probes of many units drift apart."""
GAP_S = 0.05
"""Nudged looks begin at least so far apart: a unit that answers at once must not be asked without end."""
BLIND_PAUSE_S = 1.0
"""Between looks of a probe that fails to say when it looks next."""
GRACE_S = 1.0
"""Every fetch has a timeout; a look that takes this much longer than its limit is ended here."""

_log = logging.getLogger("cellgate.probes")


class Runner:
    """One probe for one patient. `take` is called with each finding, in order."""

    def __init__(
        self, probe: Probe, context: ProbeContext, take: Callable[[Finding], None], rng: random.Random
    ) -> None:
        self._probe = probe
        self._patient = context
        self._take = take
        self._rng = rng
        self._nudged = False
        self._asleep: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._overdue = False
        self._was_late = False
        self._limit_at = math.inf
        self._last_at = -math.inf
        self._is_looking = False
        self._is_blind = False

    def nudge(self) -> None:
        """Look now."""
        if not self._nudged:
            self._nudged = True
            _wake(self._asleep)

    def due_at(self) -> float:
        """When it looks again at the latest, as things stand; inf: not before a nudge.

        While it looks, that is when it began to.
        """
        if self._is_looking:
            return self._last_at
        if self._nudged:
            return self._last_at + GAP_S
        try:
            return self._probe.due_at(self._patient, self._last_at)
        except Exception as error:
            if not self._is_blind:
                self._is_blind = True
                self._log("its schedule failed", error, f"it runs every {BLIND_PAUSE_S:g} s")
            return self._last_at + BLIND_PAUSE_S

    async def run(self) -> None:
        """Look until cancelled."""
        self._task = asyncio.current_task()
        while True:
            await self._until_due()
            self._nudged = False
            self._last_at = self._patient.now()
            self._is_looking = True
            await self._look()
            self._is_looking = False

    async def _until_due(self) -> None:
        due = self.due_at()
        while (pause_s := due - self._patient.now()) > 0.0:
            was_nudged = self._nudged
            await self._sleep(pause_s if was_nudged else pause_s * (1.0 - JITTER * self._rng.random()))
            # What is due is asked again: the unit may have shown life meanwhile, which puts the look off.
            before, due = due, self.due_at()
            if due <= before and self._nudged is was_nudged:
                return

    async def _sleep(self, pause_s: float) -> None:
        """Sleep for `pause_s`, or until a nudge."""
        loop = asyncio.get_running_loop()
        self._asleep = asleep = loop.create_future()
        timer = loop.call_later(pause_s, _wake, asleep) if pause_s < math.inf else None
        try:
            await asleep
        finally:
            self._asleep = None
            if timer is not None:
                timer.cancel()

    async def _look(self) -> None:
        try:
            await self._collect()
        except Exception as error:
            self._log("the probe failed", error, "this run is not counted")
            reason = f"the probe failed: {error!r}"
            try:
                unit, name, now = self._patient.unit.name, self._probe.name, self._patient.now()
                self._take(Evidence(unit, Sign.NEUTRAL, Strength.WEAK, name, reason, now))
            except Exception as another:
                self._log("its result could not be recorded", another, "the next run is on schedule")

    def _log(self, what: str, error: Exception, then: str) -> None:
        unit, name = self._patient.unit.name, self._probe.name
        _log.error("probe %s of unit %s: %s: %r; %s", name, unit, what, error, then)

    async def _collect(self) -> None:
        """Take what one look finds. Raises TimeoutError when it takes too long, and what the probe raises.

        By hand what `asyncio.timeout` and `aclosing` do: with thousands of looks a second their price counts.
        """
        self._overdue = False
        self._limit_at = self._last_at + self._probe.limit_s(self._patient) + GRACE_S
        findings = self._probe.look(self._patient)
        try:
            async for finding in findings:
                self._take(finding)
        except asyncio.CancelledError:
            if not self._overdue or (self._task is not None and self._task.uncancel() > 0):
                raise
            raise TimeoutError from None
        except Exception:
            # It may have been the taker that failed, while the probe is still in the middle of its look.
            await findings.aclose()
            raise

    def sweep(self, now: float) -> None:
        """End a look that takes too long; to be called now and then, for a timer for each costs too much.

        Only one that was late the time before too: when the gate has stood still, the probe's own timeouts
        are due in the same turn, and come first.
        """
        if not self._is_looking or now < self._limit_at:
            self._was_late = False
        elif not self._was_late:
            self._was_late = True
        elif self._task is not None and not self._overdue:
            self._overdue = True
            self._task.cancel()


def _wake(asleep: asyncio.Future[None] | None) -> None:
    if asleep is not None and not asleep.done():
        asleep.set_result(None)
