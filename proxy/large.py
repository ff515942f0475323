"""Large bodies are parsed in a process of their own: a thread would hold the interpreter's lock meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from proxy.ask import read_large_ask
from proxy.failure import Failure
from proxy.report.log import log_line
from router.nouns import Ask


class LargeBodies:
    """Parses bodies in one worker process, started when the first large body comes."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def read(self, body: bytes) -> Ask | Failure:
        """`read_ask(body)`, off the loop. Without a worker it costs a parse on the loop, not the request."""
        try:
            if self._pool is None:
                # Not a fork: this process has threads and sockets that a copy must not hold.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context)
            return await asyncio.get_running_loop().run_in_executor(self._pool, read_large_ask, body)
        except (BrokenProcessPool, OSError) as error:
            log_line("warning", f"no process to parse a large body in ({error!r}): parsed on the loop")
            self.close()
            return read_large_ask(body)

    def close(self) -> None:
        """End the worker."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
