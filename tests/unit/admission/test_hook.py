"""What a guardrail is not asked: what is too large, and more than there may be at one time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.proxy.admission import guardrail_client
from cellgate.proxy.admission.guardrail_client import ALLOWED, GuardrailVerdict
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import GuardrailSettings
from cellgate.proxy.http.errors import Failure

BOUND = 100


class Stage:
    """A hook whose server never answers."""

    def __init__(self, fail: Any = "closed") -> None:
        self.told: list[GuardrailVerdict | Failure] = []
        self.taken = 0
        pool = SimpleNamespace(lines=b"", take=self._take, cancel=lambda _: None)
        handle = SimpleNamespace(cancel=lambda: None)
        loop = SimpleNamespace(call_later=lambda *_: handle, call_soon=self._soon)
        settings = GuardrailSettings("http://h:1/", fail=fail)
        self.hook = guardrail_client.Hook(settings, cast(Any, pool), cast(Any, loop))

    def ask(self, size: int) -> Callable[[], None]:
        """Ask about so many bytes."""
        return self.hook.ask("request", {}, "body", b"1" * size, self.told.append)

    def _take(self, _call: object, *, fresh: bool) -> None:
        self.taken += 1

    def _soon(self, call: Callable[..., None], *args: object) -> SimpleNamespace:
        call(*args)
        return SimpleNamespace(cancel=lambda: None)


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = replace(LIMITS, guardrail_body_bytes=BOUND, guardrail_bytes=2 * BOUND + 50, guardrail_calls=5)
    monkeypatch.setattr(guardrail_client, "LIMITS", bounds)


@pytest.mark.parametrize(
    ("fail", "verdict"), [("open", ALLOWED), ("closed", guardrail_client.REQUEST_TOO_LARGE)]
)
def test_what_is_too_large_has_no_verdict(fail: str, verdict: GuardrailVerdict | Failure) -> None:
    stage = Stage(fail)
    stage.ask(BOUND)
    assert (stage.taken, stage.told) == (1, [])
    stage.ask(BOUND + 1)
    assert (stage.taken, stage.told) == (1, [verdict])


def test_all_questions_together_are_bounded_until_they_are_over() -> None:
    stage = Stage()
    stop = stage.ask(BOUND)
    stage.ask(BOUND)
    stage.ask(BOUND)
    assert stage.told == [guardrail_client.FAILED]
    for _ in range(2):
        stop()
        assert stage.hook.bytes == BOUND
    stage.ask(BOUND)
    assert (len(stage.told), stage.taken) == (1, 3)
    stage = Stage()
    for _ in range(6):
        stage.ask(1)
    assert (stage.told, stage.taken) == ([guardrail_client.FAILED], 5), "so is their number"
