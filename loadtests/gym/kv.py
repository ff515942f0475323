"""The KV cache of a simulated unit: blocks in use, blocks that can be found again, and tokens that fill none.

As vLLM keeps it: a block of a prompt or an answer has a name, that stands for all that led to it; who needs
it shares it; when nobody does it stays until its place is needed, the longest unused goes first. What must
stay true: a block is here only while all before it are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cellgate.router.kv_index import TOKEN_BYTES, Event, Removed, Stored

BLOCK_TOKENS = 64
"""vLLM's own are of 16; a quarter of the work for the simulation, and hardly another hit rate."""


class KvCache:
    """`private` are tokens in blocks that are not full. Nothing is ever refused: see to `used` before."""

    __slots__ = ("_idle", "_users", "limit", "private", "publish")

    def __init__(self, limit: int, publish: Callable[[Event], None] | None = None) -> None:
        self.limit = limit
        self.publish = publish
        """Told of what is stored and removed, as engines publish it; None: nobody listens."""
        self.private = 0
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Tokens that sequences hold."""
        return len(self._users) * BLOCK_TOKENS + self.private

    @property
    def idle(self) -> int:
        """Tokens that nobody holds, and that can be found again."""
        return len(self._idle) * BLOCK_TOKENS

    def find(self, names: tuple[int, ...], tokens: int) -> int:
        """How many of the blocks of a prompt are here. Its last token is computed in any case."""
        low, high = 0, min(len(names), (tokens - 1) // BLOCK_TOKENS)
        users, idle = self._users, self._idle
        while low < high:
            middle = (low + high + 1) // 2
            name = names[middle - 1]
            if name in users or name in idle:
                low = middle
            else:
                high = middle - 1
        return low

    def idle_among(self, names: tuple[int, ...]) -> int:
        """Tokens of those blocks that nobody holds: to hold them takes as much room as to compute them."""
        return sum(1 for name in names if name in self._idle) * BLOCK_TOKENS

    def store(self, names: tuple[int, ...], before: tuple[int, ...]) -> None:
        """Take a share in blocks that were computed just now, behind those `before`."""
        if self.publish is not None:
            known = [name for name in names if name in self._users or name in self._idle]
            new = names[len(known) :]
            if new:
                tokens = b"".join(name.to_bytes(8, "big") * (BLOCK_TOKENS * TOKEN_BYTES // 8) for name in new)
                parent = known[-1] if known else before[-1] if before else None
                self.publish(Stored(new, parent, tokens, BLOCK_TOKENS))
        self.hold(names)

    def hold(self, names: tuple[int, ...]) -> None:
        """Take a share in blocks that are here."""
        users, idle = self._users, self._idle
        for name in names:
            idle.pop(name, None)
            users[name] = users.get(name, 0) + 1

    def release(self, names: tuple[int, ...]) -> None:
        """Give up a share in blocks; of a text the end goes first."""
        users = self._users
        for name in reversed(names):
            users[name] -= 1
            if not users[name]:
                del users[name]
                self._idle[name] = None

    def evict(self) -> None:
        """Make idle blocks go for which there is no room any more."""
        room = (self.limit - self.used) // BLOCK_TOKENS
        gone = []
        while len(self._idle) > room and self._idle:
            gone.append(self._idle.popitem(last=False)[0])
        if gone and self.publish is not None:
            self.publish(Removed(gone))
