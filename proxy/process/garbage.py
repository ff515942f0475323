"""Settings of the garbage collector for a long-lived process."""

from __future__ import annotations

import gc


def calm_the_collector() -> None:
    """Reduce the work of the garbage collector."""
    # Objects that exist now live as long as the process, so collections can skip them; and requests create
    # few cycles, so young collections may be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
