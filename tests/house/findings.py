"""What a rule finds, and what is open until it is mended."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One place where a rule is not kept. `key` names it in the list of what is open (open.py)."""

    key: str
    detail: str
