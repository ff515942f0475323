"""Waiting for what must come to be, and looking on from a thread meanwhile."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

LOOK_S = 0.05


async def until(look: Callable[[], T], patience_s: float, look_s: float = LOOK_S) -> T:
    """What `look` finds, in a thread: as soon as that is something, and after `patience_s` whatever it is."""
    give_up_at = time.monotonic() + patience_s
    while True:
        if (found := await asyncio.to_thread(look)) or time.monotonic() > give_up_at:
            return found
        await asyncio.sleep(look_s)


def wait_until(look: Callable[[], T], patience_s: float, look_s: float = LOOK_S) -> T:
    """The same where there is no event loop."""
    give_up_at = time.monotonic() + patience_s
    while not ((found := look()) or time.monotonic() > give_up_at):
        time.sleep(look_s)
    return found


@contextmanager
def repeated(look: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Inside, a thread looks again and again, with a pause before each look."""
    over = threading.Event()

    def look_on() -> None:
        while not over.wait(pause_s):
            look()

    thread = threading.Thread(target=look_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
