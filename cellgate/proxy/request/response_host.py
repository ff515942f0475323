"""What responses need of their gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.logs.record import Finished

if TYPE_CHECKING:
    from cellgate.proxy.wire.request import Request


class ResponseHost(Protocol):
    """The gateway, as a response sees it."""

    is_leaving: bool
    shows_all: bool
    """Everybody may know which unit answers."""

    def now(self) -> float: ...
    def new_id(self) -> bytes: ...
    def report_lines(self, request: Request, *, to_trusted: bool) -> bytes: ...
    def finished(self, record: Finished) -> None: ...
