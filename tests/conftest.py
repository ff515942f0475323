"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: without them a collection takes a tenth of the time."""
    gc.collect()
    gc.freeze()
