"""Kinds of stages: `Stage` has a gate of one process, `crew` one with workers, where that extra is."""

from __future__ import annotations

from typing import Any

from tests.extras import needs
from tests.scenarios.harness import Stage

HAS_WORKERS = needs("workers")


def crew(*args: Any, **options: Any) -> Stage:
    """A stage whose gate is a control process and two workers."""
    from tests.scenarios.extras.workers.crew import CrewStage

    return CrewStage(*args, **options)
