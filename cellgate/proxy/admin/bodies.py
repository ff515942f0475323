"""Bodies of requests to the admin port: limits of their size, time and number."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cellgate.proxy.config.settings import MIB

BODY_BYTES = MIB
"""aiohttp's own bound for a body that is read as a whole."""
BODY_S = 30.0
BODIES_AT_ONCE = 16
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Bodies:
    """Reads them."""

    def __init__(self) -> None:
        self._seats = asyncio.Semaphore(BODIES_AT_ONCE)

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body. Raises HTTPRequestTimeout and HTTPRequestEntityTooLarge."""
        try:
            async with asyncio.timeout(BODY_S), self._seats:
                expects = request.headers.get("Expect", "").lower()
                if expects == "100-continue" and request.transport is not None:
                    request.transport.write(_CONTINUE)
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
