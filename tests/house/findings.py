"""What a rule finds."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One place where a rule is broken."""

    where: str
    detail: str
