"""Async tests of this folder run on real sockets and the loop that the gate uses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.wire.stage import run_live


@pytest.fixture(autouse=True)
def play(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs each of them (tests/conftest.py)."""
    run: Callable[[Coroutine[Any, Any, None]], None] = getattr(request, "param", run_live)
    return run
