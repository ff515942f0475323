"""Which model serves a name: aliases, splits, fallbacks."""

from __future__ import annotations

from collections import Counter

import pytest

from cellgate.proxy.request.models import ModelChoice, choice_of

SPLIT = {"gpt": (("v1", 95.0), ("v2", 5.0))}
REQUESTS = 10_000


def sessions(choice: ModelChoice) -> dict[str, str]:
    return {f"session-{n}": choice.served("gpt", f"session-{n}") for n in range(REQUESTS)}


def test_a_split_is_as_configured() -> None:
    shares = Counter(sessions(ModelChoice(SPLIT, {})).values())
    assert shares["v2"] / REQUESTS == pytest.approx(0.05, abs=0.007)


def test_a_session_never_moves() -> None:
    assert sessions(ModelChoice(SPLIT, {})) == sessions(ModelChoice(SPLIT, {}))


def test_only_the_sessions_between_the_borders_move_when_weights_change() -> None:
    before = sessions(ModelChoice(SPLIT, {}))
    after = sessions(ModelChoice({"gpt": (("v1", 80.0), ("v2", 20.0))}, {}))
    moved = [session for session in before if before[session] != after[session]]
    assert len(moved) / REQUESTS == pytest.approx(0.15, abs=0.02)
    assert {after[session] for session in moved} == {"v2"}


def test_names_are_split_independently() -> None:
    choice = ModelChoice({**SPLIT, "other": SPLIT["gpt"]}, {})
    both = sum(
        choice.served("gpt", f"{n}") == choice.served("other", f"{n}") == "v2" for n in range(REQUESTS)
    )
    assert both < REQUESTS * 0.01


def test_other_names_are_models() -> None:
    assert ModelChoice(SPLIT, {}).served("v7", "session") == "v7"
    assert ModelChoice({"gpt": (("llama", 1.0),)}, {}).served("gpt", "") == "llama"


def test_fallbacks_are_those_of_the_name_else_of_the_model() -> None:
    choice = ModelChoice(SPLIT, {"gpt": ("small",), "v2": ("v1", "small")})
    assert choice.others("gpt", "v2") == ("small",)
    assert choice.others("v2", "v2") == ("v1", "small")
    assert choice.others("v3", "v3") == ()


def test_nothing_configured_is_nothing() -> None:
    assert choice_of({}, {}) is None
