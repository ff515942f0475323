"""An engine that answers probes as a test wants, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cellgate.probes.base import FetchError, Reply, Trouble

LATENCY_S = 0.01
METRICS = """vllm:num_requests_running {running}
vllm:generation_tokens_total {tokens}
process_start_time_seconds {epoch}
"""


class PendingTask:
    """A request on its way, as a task."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def abandon(self) -> None:
        self._task.cancel()


class Engine:
    """What a unit does: refuse, hang behind a lying `/health` (frozen), or answer.

    `tokens_per_s` is other people's work there.
    """

    def __init__(self) -> None:
        self.refuses = False
        self.frozen = False
        self.epoch = 1
        self.tokens_per_s = 0.0
        self.running = 3
        self.asked: list[tuple[float, str]] = []
        self.thawed = asyncio.Event()
        self.answered_at = 0.0

    def thaw(self) -> None:
        """What hung is answered now."""
        self.frozen = False
        self.thawed.set()

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        request_id: str = "",
        rank: int | None = None,
        fresh: bool = False,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        now = asyncio.get_running_loop().time()
        self.asked.append((now, target))
        await asyncio.sleep(LATENCY_S)
        if self.refuses:
            raise FetchError(Trouble.REFUSED, "connection refused")
        if target == "/metrics":
            tokens = int(now * self.tokens_per_s)
            return Reply(
                200, {}, METRICS.format(running=self.running, tokens=tokens, epoch=self.epoch).encode()
            )
        if target == "/version":
            return Reply(200, {}, b'{"version": "0.32.0"}')
        if target == "/v1/models":
            return Reply(200, {}, b'{"data": [{"id": "m"}]}')
        if target.startswith("/v1/") and self.frozen:
            thawed = asyncio.ensure_future(self.thawed.wait())
            try:
                done, _ = await asyncio.wait((thawed,), timeout=timeout_s)
            finally:
                thawed.cancel()
            if not done:
                raise FetchError(Trouble.TIMEOUT, "no answer in time")
        return Reply(200, {}, b'{"choices": [{}]}')

    def get(
        self,
        target: str,
        done: Callable[[Reply | FetchError], None],
        *,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> PendingTask:
        async def ask() -> Reply | FetchError:
            try:
                return await self("GET", target, timeout_s=timeout_s, max_bytes=max_bytes)
            except FetchError as error:
                return error

        def tell(asked: asyncio.Task[Reply | FetchError]) -> None:
            if not asked.cancelled():
                done(asked.result())

        asking = asyncio.create_task(ask())
        asking.add_done_callback(tell)
        return PendingTask(asking)

    @property
    def canaries(self) -> list[float]:
        """When each canary came."""
        return [at for at, target in self.asked if target == "/v1/chat/completions"]
