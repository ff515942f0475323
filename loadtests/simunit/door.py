"""The unit's public port, which a fault can shut: it refuses new connections, open streams go on."""

import asyncio
import errno

from aiohttp import web

_PORT_LOOK_S = 0.005


class Door:
    """Listens for a runner's server on one port, and can stop and start again on the same."""

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        self._runner = runner
        self.host = host
        self._listener: asyncio.Server | None = None
        self.port = port

    async def open(self) -> None:
        """Start to listen; no effect when open. Port 0 becomes the one found free. Raises OSError."""
        if self._listener is None:
            loop = asyncio.get_running_loop()
            server = self._runner.server
            assert server is not None, "the runner must be set up first"
            self._listener = await loop.create_server(server, self.host, self.port, backlog=1024)
            self.port = self._listener.sockets[0].getsockname()[1]

    async def open_when_free(self) -> None:
        """Start to listen as soon as whoever has the port is gone. Raises OSError for any other reason."""
        while True:
            try:
                return await self.open()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            await asyncio.sleep(_PORT_LOOK_S)

    def shut(self) -> None:
        """Refuse new connections, end the idle ones now and the busy ones after their answer."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self._runner.server is not None:
                self._runner.server.pre_shutdown()
