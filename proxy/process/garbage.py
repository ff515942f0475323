"""The collector of garbage, in a process that lives long."""

from __future__ import annotations

import gc


def calm_the_collector() -> None:
    """Let the collector of garbage find little to do."""
    # What is alive now lives as long as the process, so collections need not look at it again; and requests
    # leave few cycles behind, so that young collections may be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
