"""How units get new software, as it is configured. rolling/ does it."""

from __future__ import annotations

from dataclasses import dataclass

from cellgate.proxy.config.unit_actions import SetImage, UnitAction


@dataclass(frozen=True, slots=True)
class RollPolicy:
    """How units get new software: an action for each, and the bounds of a roll.

    `action` brings the new software to a unit, `undo` (none) the old one back; `audit` is the file that gets
    a line for all that is done. timeout_s (30): an action that takes longer is given up.
    parallel (1): so many units of a cell at one time; max_unavailable (1): no unit is begun when more than so
    many would be out of rotation, for whatever reason. drain_s (60): how long requests of a unit may finish
    before its command. start_s (600): how long a unit may take until it is UP again. soak_s (60): how long it
    is watched with requests before the next one.
    max_errors (0.5), max_degraded (0.3): a unit with a larger recent share of failed requests (one is 0.5,
    two in a row are 0.75), or slower than its cell by more, fails the roll.
    """

    action: UnitAction
    audit: str
    undo: UnitAction | None = None
    timeout_s: float = 30.0
    parallel: int = 1
    max_unavailable: int = 1
    drain_s: float = 60.0
    start_s: float = 600.0
    soak_s: float = 60.0
    max_errors: float = 0.5
    max_degraded: float = 0.3

    @property
    def highest_first(self) -> bool:
        """Whether units have to be taken by their numbers, from the highest down, undone ones as well."""
        return isinstance(self.action, SetImage)
