"""What responses need of their gate."""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.wire.heads import Fields


class ResponseHost(Protocol):
    """The gateway, as a response sees it."""

    is_leaving: bool

    def now(self) -> float: ...
    def new_id(self) -> bytes: ...
    def report_lines(self, fields: Fields, *, to_trusted: bool) -> bytes: ...
    def finished(self, record: Finished) -> None: ...
