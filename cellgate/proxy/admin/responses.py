"""Responses of the admin port."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from aiohttp import web

from cellgate.proxy.ingress.envoy_health import HeaderPairs
from cellgate.proxy.wire.failure import Failure, error_body


def reply(
    body: bytes,
    status: int = HTTPStatus.OK,
    *,
    content_type: str = "application/json",
    headers: HeaderPairs = (),
) -> web.Response:
    """A whole response. A large one is written piece by piece, and the loop turns between two."""
    return web.Response(body=io.BytesIO(body), status=status, headers=_fields(content_type, headers))


def refusal_reply(failure: Failure) -> web.Response:
    """The response to a request that is refused unread; it closes its connection."""
    response = reply(error_body(failure), failure.kind.row.status, headers=(("Connection", "close"),))
    response.force_close()
    return response


class Stream(web.StreamResponse):
    """A response whose `parts` are sent as they come; they are closed when the caller leaves."""

    def __init__(
        self, parts: AsyncGenerator[bytes, None], content_type: str, headers: HeaderPairs = ()
    ) -> None:
        super().__init__(headers=_fields(content_type, headers))
        self._parts = parts

    async def send(self) -> None:
        """Send all parts, until there is none."""
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await self.write(part)


def _fields(content_type: str, headers: HeaderPairs) -> HeaderPairs:
    # By itself aiohttp names its own version as the server.
    return (("Content-Type", content_type), ("Server", "cellgate"), *headers)
