"""A query of death: what a leader does when it gets a prompt with one certain word in it."""

import asyncio
import os

from aiohttp import web

MARKER = "arsenic"
MODES = ("cut", "crash", "late", "mid")
"""Its connection is closed; the process exits at once, after LATE_S of work, after a token."""
LATE_S = 1.5
_FLUSH_S = 0.002


class Poison:
    """What is done in `mode` (empty: nothing); `struck`: how many times a connection was closed."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.struck = 0

    async def taken(self, request: web.Request, prompt: str) -> None:
        """A request was read."""
        if MARKER not in prompt:
            return
        if self.mode == "cut" and request.transport is not None:
            self.struck += 1
            request.transport.close()
            # Its handler is cancelled as soon as the connection is gone.
            await asyncio.sleep(LATE_S)
        elif self.mode == "late":
            await asyncio.sleep(LATE_S)
        if self.mode in ("crash", "late"):
            os._exit(1)

    def strikes_after_token(self, prompt: str) -> bool:
        """Whether a first token is the last thing that comes."""
        return self.mode == "mid" and MARKER in prompt

    def strike(self) -> None:
        """Exit, once what was written has left."""
        asyncio.get_running_loop().call_later(_FLUSH_S, os._exit, 1)
