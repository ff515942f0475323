"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from typing import Any

import pytest

from cellgate.extras import EXTRAS

# They play several gates with a Redis.
collect_ignore = [] if "redis" in EXTRAS else ["scenarios/test_day.py", "scenarios/test_plans.py"]


def pytest_configure() -> None:
    """In the background of a shell SIGINT is ignored, by all that is started too; tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: without them a collection takes a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An async test is run by its fixture `play` if it has one, else by asyncio."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    play: Any = pyfuncitem.funcargs.get("play", asyncio.run)
    names = inspect.signature(pyfuncitem.obj).parameters
    play(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
