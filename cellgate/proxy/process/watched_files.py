"""Files that others replace while the gate runs: certificates, keys and tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable

Signature = tuple[int, int, int, int] | None
"""What changes with a file: device, inode, size, and time in nanoseconds; None: there is none."""


class WatchedFiles:
    """Notices that one of these files was replaced or rewritten, also behind symbolic links.

    Kubernetes swaps a link to a folder, cert-manager's volumes as well: so what a path leads to is compared,
    and not the path's own entry.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._taken = self._seen = self._look()

    def changed(self) -> bool:
        """Whether they differ from what was taken before, and did not change since the last call; then that
        is what was taken. So who writes two files one after the other is not caught between them.
        """
        if not self._paths:
            return False
        seen, self._seen = self._seen, self._look()
        if self._seen != seen or seen == self._taken:
            return False
        self._taken = seen
        return True

    def _look(self) -> tuple[Signature, ...]:
        return tuple(map(signature, self._paths))


def signature(path: str) -> Signature:
    """What tells one content of a file from another. Links are followed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
