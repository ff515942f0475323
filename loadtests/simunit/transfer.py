"""KV blocks that units hold for each other, as with vLLM's NixlConnector, and the links that they move over.

What must stay true: what a unit says follows from the blocks that it fetched, whatever prompt came with them,
so that a gate which mixes up two requests is seen in its clients' answers. Blocks are held until they have
been fetched, or for HELD_S.
"""

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from aiohttp import ClientError, ClientSession, web

from loadtests.simunit.door import Door
from loadtests.simunit.engine import Engine
from loadtests.simunit.requests import ApiError, TransferParams
from loadtests.simunit.text import BLOCK_TOKENS, Context

HELD_S = 30.0
"""Blocks that nobody fetches are freed after this (vLLM: kv_lease_duration)."""
LINK_FAULTS = ("heal", "cut", "hang", "slow")
"""Transfers fail at once; they never end; they take `factor` times as long."""
STRANGE = "the blocks of somebody else"
"""What is found where blocks were that are held no more. The engine does not notice."""


@dataclass(slots=True)
class Link:
    """The way from one prefiller to this unit. `failures` are transfers that failed, or were given up by who
    waited for them: when each began and ended, by the wall clock.
    """

    fault: str = "heal"
    factor: float = 1.0
    moved: int = 0
    failures: list[tuple[float, float]] = field(default_factory=list)
    free_at: float = 0.0
    """Transfers go one after the other; this is when the last one ends."""


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks of one prompt. `names` are those that are full."""

    prompt: str
    names: list[int]
    timer: asyncio.TimerHandle


class Transfers:
    """Both sides of one unit: the blocks that it holds, and those that it fetches. Others reach the blocks
    through `key_check`.
    """

    def __init__(self, name: str, engine: Engine, door: Door) -> None:
        self._name = name
        self._engine = engine
        self._door = door
        self._numbers = count()
        self._held: dict[str, Held] = {}
        self._links: dict[str, Link] = {}

    def add_to(self, app: web.Application) -> None:
        """Register the routes: for other units, and for whoever hurts links."""
        app.router.add_get("/sim/blocks/{key}", self._read)
        app.router.add_delete("/sim/blocks/{key}", self._free)
        app.router.add_post("/sim/link", self._hurt)

    def links(self) -> dict[str, Any]:
        """All links to this unit, by prefiller, ready for JSON."""
        return {prefiller: asdict(link) for prefiller, link in self._links.items()}

    # -- the prefiller -------------------------------------------------------------------------------------

    def hold(self, request_id: str, prompt: str, context: Context) -> dict[str, Any]:
        """A prompt has just been computed: keep its blocks. Returns what its decoder needs to fetch them."""
        key = f"{request_id}-{next(self._numbers):08x}"
        pool = self._engine.pool
        names = context.block_hashes[: pool.match(context.block_hashes)]
        pool.hold(names)
        timer = asyncio.get_running_loop().call_later(HELD_S, self._expire, key)
        self._held[key] = Held(prompt, names, timer)
        self._engine.moved.held = len(self._held)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(names)))],
            "remote_engine_id": self._name,
            "remote_request_id": key,
            "remote_host": self._door.host,
            "remote_port": self._door.port,
        }

    async def _read(self, request: web.Request) -> web.Response:
        held = self._held.get(request.match_info["key"])
        return web.Response(text=held.prompt if held is not None else STRANGE)

    async def _free(self, request: web.Request) -> web.Response:
        self._drop(request.match_info["key"])
        return web.Response(status=204)

    def _expire(self, key: str) -> None:
        self._engine.moved.expired += 1
        self._drop(key)

    def _drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held.timer.cancel()
            self._engine.pool.release(held.names, 0)
            self._engine.moved.held = len(self._held)

    # -- the decoder ---------------------------------------------------------------------------------------

    async def fetch(self, given: TransferParams) -> Context:
        """Fetch the blocks of a prompt, and let them be freed; the text that they stand for. Raises ApiError
        500 when they do not arrive.
        """
        link, moved = self._links.setdefault(given.remote_engine_id, Link()), self._engine.moved
        began, arrived = time.time(), False
        moved.fetching += 1
        try:
            context = await self._pull(given, link)
            arrived = True
            return context
        except ClientError as error:
            raise ApiError(500, f"KV load failed from {given.remote_engine_id}: {error}") from error
        finally:
            moved.fetching -= 1
            if not arrived:
                moved.failed += 1
                link.failures.append((began, time.time()))

    async def _pull(self, given: TransferParams, link: Link) -> Context:
        url = f"http://{given.remote_host}:{given.remote_port}/sim/blocks/{given.remote_request_id}"
        await _pass(link)
        async with ClientSession() as session:
            async with session.get(url) as response:
                context = Context(await response.text())
            cached = self._engine.pool.match(context.block_hashes) * BLOCK_TOKENS
            await self._move(max(context.tokens - cached, 0), link)
            await _pass(link)
            async with session.delete(url):
                return context

    async def _move(self, tokens: int, link: Link) -> None:
        now = asyncio.get_running_loop().time()
        seconds = tokens / self._engine.timing.transfer_tokens_per_s * link.factor
        link.free_at = max(link.free_at, now) + seconds
        await asyncio.sleep(link.free_at - now)
        link.moved += tokens

    async def _hurt(self, request: web.Request) -> web.Response:
        """A command such as {"prefiller": "p1", "fault": "slow", "factor": 20}."""
        command = json.loads(await request.read())
        if command.get("fault") not in LINK_FAULTS:
            raise ApiError(
                400, f"fault must be one of {', '.join(LINK_FAULTS)}, not {command.get('fault')!r}"
            )
        link = self._links.setdefault(command["prefiller"], Link())
        link.fault, link.factor = command["fault"], 1.0
        if link.fault == "slow":
            link.factor = float(command["factor"])
        return web.json_response(self.links())


async def _pass(link: Link) -> None:
    """Raises ClientError where the link is cut; never returns where it hangs."""
    if link.fault == "cut":
        raise ClientError("the link is cut")
    if link.fault == "hang":
        await asyncio.Event().wait()
