"""When cyclic garbage of a long-lived process is collected.

A collection stops the loop for some 0.2 us an object that it looks at, and finds hardly anything: requests
break their cycles when they end. So new objects are looked at a few at a time: at each tick, and between two
ticks when many are made. The old ones, which the interpreter would look through several times while streams
begin (60 ms with 2,000), are left alone until nobody waits, or memory has doubled beside what clients and
known prompts hold: with 10,000 streams, or the prompts of some minutes, a look at all takes 0.1 to 0.7 s, and
all that is found is alive.

In this order: `Garbage`, `slow_build`, `SmallBlocks`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import sysconfig
from collections.abc import Callable

NEW_OBJECTS = 2_000
"""After so many more objects were made than freed, the new ones are looked at: half a millisecond.

The interpreter counts an old object that is freed as a new one less. While streams begin as others end, the
count stays low until all of them are new (15 ms with 2,000): it is not enough to wait for it.
"""
GROWTH = 2.0
"""All objects are looked at when there are so many times more blocks of memory than after the last time."""
CLIENT_BLOCKS = 150
"""Blocks that a client may hold, which are no garbage: a stream has some 110 with both of its connections."""
MEMORY_PERIOD_S = 1.0
"""How often blocks are counted: the interpreter looks at each page of its memory for that, which takes 0.6 ms
with 150 MB."""
MEMORY_IDLE_S = 600.0
"""And so long after the last time, once no request is in flight."""
_NEVER = 1_000_000_000
_NEW, _ALL = 0, 2


class Garbage:
    """Collects the garbage among new objects at each tick, and among old ones when it is due. `is_idle` says
    whether no request is in flight, `blocks` how many blocks of memory are in use, and `held` how many of
    them by clients and known prompts; `collect` is given the oldest generation to be looked at.
    """

    def __init__(
        self,
        now: float,
        is_idle: Callable[[], bool],
        held: Callable[[], int],
        blocks: Callable[[], int] = sys.getallocatedblocks,
        collect: Callable[[int], object] = gc.collect,
    ) -> None:
        self._is_idle = is_idle
        self._held = held
        self._blocks = blocks
        self._collect = collect
        self._at, self._after = now, blocks()
        self._least = self._after
        self._count_at = now

    def tick(self, now: float) -> None:
        """Collect: all, if memory has grown, or if it was long ago and nobody waits."""
        if now >= self._count_at and self._is_due(now):
            self._collect(_ALL)
            self._collected(now)
        else:
            self._collect(_NEW)

    def _is_due(self, now: float) -> bool:
        self._count_at = now + MEMORY_PERIOD_S
        if now - self._at >= MEMORY_IDLE_S and self._is_idle():
            return True
        most = GROWTH * self._after
        return self._blocks() > most and self._beside_held() > most

    def _collected(self, now: float) -> None:
        self._at, self._after = now, max(self._beside_held(), self._least)

    def _beside_held(self) -> int:
        return self._blocks() - self._held()


def calm_the_collector() -> None:
    """Reduce the work of the garbage collector; `Garbage` does what it leaves undone."""
    gc.collect()
    # Objects that exist now live as long as the process, so collections can skip them.
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, _NEVER, _NEVER)


# Whether the Python that runs here was built to be fast.


_OPTIMISED = "--enable-optimizations"
_OF_DISTRIBUTIONS = "/usr"
"""Debian and others build theirs with profiles by flags of their own."""


def slow_build(
    options: str = str(sysconfig.get_config_var("CONFIG_ARGS") or ""), prefix: str = sys.base_prefix
) -> str:
    """A line about an interpreter that was built without profile-guided optimisation; empty: none is known.

    `options` are those of its configure script, `prefix` is where it is.
    """
    if _OPTIMISED in options or not options or prefix == _OF_DISTRIBUTIONS:
        return ""
    return (
        f"this Python ({prefix}) was built without {_OPTIMISED}: a request takes 10 to 20 % more CPU; "
        "use Debian's, or that of the Docker image"
    )


# Returns unused memory to the system. With a C library other than glibc it does nothing.


LARGE_BLOCK_BYTES = 4 << 20
"""To parse a body takes a block of thirteen times its size: up to 300 kB one that is used again."""
KEPT_BYTES = 8 << 20
"""So much that is free at the end of the heap is kept."""
HEAP_BYTES_MAX = 192 << 20
"""Trimming a larger heap takes more than some 25 ms."""
CROWD = 64
"""After this many clients have left, trimming is worthwhile, …"""
FEW = 8
"""… once at most this many leave within a tick."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h, for mallopt(3)."""
_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15
"""Of prctl.h, for prctl(2)."""


def return_large_blocks() -> None:
    """Have the C library return each block of `LARGE_BLOCK_BYTES` or more to the system when it is freed, and
    what is free at the end of the heap beyond `KEPT_BYTES`.

    glibc does so at first, but keeps ever larger blocks once some were freed: after a wave of large bodies a
    process would stay as large as it has ever been. Smaller blocks must not be returned each time: the system
    clears every page of a new one, which for a body of 200 kB takes longer than all the rest.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


class SmallBlocks:
    """Trims the heap once many clients have left: by itself the C library returns only the end of its heap,
    and one block in use there keeps everything below it.

    `clients` says how many there are.
    """

    def __init__(self, clients: Callable[[], int]) -> None:
        self._clients = clients
        self._most = self._last = 0
        self._heap_begin = _heap_end()

    def tick(self, _now: float) -> None:
        """Trim the heap if half of the most clients have left, and hardly any are leaving now."""
        before, self._last = self._last, self._clients()
        self._most = max(self._most, self._last)
        if self._most >= CROWD and self._last <= self._most // 2 and before - self._last <= FEW:
            self._most = self._last
            if _heap_end() - self._heap_begin <= HEAP_BYTES_MAX:
                return_small_blocks()


def return_small_blocks() -> None:
    """Have the C library return all unused whole pages to the system."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def keep_from_others() -> None:
    """Let no other process of this user read the memory, the variables and the open files of this one and of
    those that it forks, nor a core dump have them: that takes root with CAP_SYS_PTRACE (prctl(2)).
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def name_process(name: str) -> None:
    """Show what this process is, to ps and top."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    """Not every system has it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _heap_end() -> int:
    """Where the heap ends now (sbrk(2))."""
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_ssize_t
    end: int = sbrk(ctypes.c_ssize_t(0))
    return end
