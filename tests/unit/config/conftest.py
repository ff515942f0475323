"""No secrets of the environment in the configuration that tests read."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ADMIN_TOKEN",
        "AGENT_TOKEN",
        "UNIT_API_KEY",
        "REDIS_USERNAME",
        "REDIS_PASSWORD",
        "WEBHOOK_SECRET",
    ):
        monkeypatch.delenv(f"CELLGATE_{name}", raising=False)
