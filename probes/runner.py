"""The runner: lets one probe look at one unit, again and again, for as long as the unit is watched.

1. Looks never overlap. A nudge makes the next look now, or right after the one that is on its way.
2. Nothing a probe does ends the task: an exception is one logged line and neutral evidence.
3. Time is the loop's, randomness is injected.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from contextlib import aclosing, suppress

from probes.base import Patient, Probe
from router.nouns import Evidence, Finding, Sign, Strength

JITTER = 0.1
"""Each pause is stretched by up to this share, so that probes of many units drift apart."""
GAP_S = 0.05
"""Nudged looks begin at least so far apart: a unit that answers at once must not be asked without end."""
GRACE_S = 1.0
"""Every fetch has a timeout; a look that takes this much longer than its limit is ended here."""

_log = logging.getLogger("cellgate.probes")


class Runner:
    """One probe for one patient. `take` is called with each finding, in order."""

    def __init__(
        self, probe: Probe, patient: Patient, take: Callable[[Finding], None], rng: random.Random
    ) -> None:
        self._probe = probe
        self._patient = patient
        self._take = take
        self._rng = rng
        self._nudged = asyncio.Event()
        self._last_at = -math.inf

    def nudge(self) -> None:
        """Look now."""
        self._nudged.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._until_due()
            self._nudged.clear()
            self._last_at = self._patient.now()
            await self._look()

    async def _until_due(self) -> None:
        # What is due is asked again after each pause: the unit may have shown life meanwhile.
        while (pause_s := self.due_at() - self._patient.now()) > 0.0:
            if self._nudged.is_set():
                await asyncio.sleep(pause_s)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * (1.0 + JITTER * self._rng.random())):
                    await self._nudged.wait()

    def due_at(self) -> float:
        """When the next look begins, on the loop's time, as things stand."""
        if self._nudged.is_set():
            return self._last_at + GAP_S
        return self._probe.due_at(self._patient, self._last_at)

    async def _look(self) -> None:
        try:
            limit_s = self._probe.limit_s(self._patient) + GRACE_S
            async with (
                asyncio.timeout(limit_s if limit_s < math.inf else None),
                aclosing(self._probe.look(self._patient)) as findings,
            ):
                async for finding in findings:
                    self._take(finding)
        except Exception as error:
            unit, name = self._patient.unit.name, self._probe.name
            reason = f"the probe itself failed: {error!r}"
            _log.error("probe %s of unit %s: %s; this look is not counted", name, unit, reason)
            now = self._patient.now()
            self._take(Evidence(unit, Sign.NEUTRAL, Strength.WEAK, name, reason, now))
