"""Whether the Python that runs here was built to be fast."""

from __future__ import annotations

import sys
import sysconfig

_OPTIMISED = "--enable-optimizations"
_OF_DISTRIBUTIONS = "/usr"
"""Debian and others build theirs with profiles by flags of their own."""


def slow_build(
    options: str = str(sysconfig.get_config_var("CONFIG_ARGS") or ""), prefix: str = sys.base_prefix
) -> str:
    """A line about an interpreter that was built without profile-guided optimisation; empty: none is known.

    `options` are those of its configure script, `prefix` is where it is.
    """
    if _OPTIMISED in options or not options or prefix == _OF_DISTRIBUTIONS:
        return ""
    return (
        f"this Python ({prefix}) was built without {_OPTIMISED}: a request takes 10 to 20 % more CPU; "
        "use Debian's, or that of the Docker image"
    )
