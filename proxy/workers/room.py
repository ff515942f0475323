"""Whether there is room for so many workers: each costs the first process, and the brain, descriptors."""

from __future__ import annotations

import resource

from proxy.config import ConfigError

OWN_DESCRIPTORS = 64
"""Of a process without any worker: listeners, probes of a few units, the admin port."""
FOR_EACH = 2
"""A worker's socket to the one that starts it, or to the brain; and another while it is replaced."""


def check_descriptors(workers: int) -> None:
    """Raises ConfigError, in one line, when so many workers need more descriptors than are allowed."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_DESCRIPTORS + FOR_EACH * workers
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        room = max(1, (allowed - OWN_DESCRIPTORS) // FOR_EACH)
        limit = "no limit" if most == resource.RLIM_INFINITY else f"{most}"
        raise ConfigError(
            [
                f"workers: {workers} need {needed} descriptors, and a process here may have {allowed}, which "
                f"is room for {room}; raise it with `ulimit -n` (up to {limit} without privileges), "
                "LimitNOFILE= under systemd, or --ulimit nofile= with docker"
            ]
        )
