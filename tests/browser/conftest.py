"""A browser that all tests of a run share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """One that runs."""
    with chromium(tmp_path_factory.mktemp("chromium")) as port:
        yield port
