"""The KV cache as vLLM keeps it: a fixed number of blocks, full ones named by the text that led to them.

What must stay true: blocks in use + blocks idle never exceed `num_blocks`; an idle block can be found again
by its name until its place is needed, oldest first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class BlockPool:
    """Block accounting. A block is in use under a name (shared), in use but not full, idle, or blank."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._unnamed = 0

    @property
    def used(self) -> int:
        """Blocks that some sequence needs now."""
        return len(self._users) + self._unnamed

    def match(self, names: Sequence[int]) -> int:
        """How many leading blocks of `names` are here, in use or idle."""
        return sum(1 for _ in takewhile(lambda name: name in self._users or name in self._idle, names))

    def hold(self, names: Iterable[int]) -> None:
        """Take a share in blocks that `match` has found."""
        for name in names:
            self._idle.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1

    def take(self, count: int) -> bool:
        """Reserve `count` unnamed blocks, evicting those longest idle; False if too few are left."""
        if self.used + count > self.num_blocks:
            return False
        self._unnamed += count
        while self.used + len(self._idle) > self.num_blocks:
            self._idle.popitem(last=False)
        return True

    def fill(self, name: int) -> None:
        """An unnamed block is full: give it its name, or give it up where that text is held already."""
        self._unnamed -= 1
        self.hold([name])

    def release(self, names: Sequence[int], unnamed: int) -> None:
        """Give up a share in `names`, and `unnamed` blocks. Of a text the end is evicted first."""
        self._unnamed -= unnamed
        for name in reversed(names):
            self._users[name] -= 1
            if self._users[name] == 0:
                del self._users[name]
                self._idle[name] = None
