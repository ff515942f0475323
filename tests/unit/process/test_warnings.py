"""What `cellgate check` says of a configuration that is valid and cannot be meant."""

from __future__ import annotations

import pytest

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.process.warnings import warnings_of
from cellgate.router.nouns import Fleet, Node, Role, Unit

A1 = Unit("a1", "a", "http://127.0.0.1:8100", models=("m",))


def settings(*more: Unit, **options: object) -> Settings:
    return Settings(fleet=Fleet(units=(A1, *more)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            settings(Unit("a2", "a", "http://localhost:8100")),
            "unit a2: http://localhost:8100 is where unit a1 is",
        ),
        (
            settings(Unit("a2", "a", "http://127.0.0.1:8000")),
            "unit a2: http://127.0.0.1:8000 is listen of this",
        ),
        (settings(trusted=("10.0.0.0/8", "0.0.0.0/0")), "trusted[1]: 0.0.0.0/0 is everybody"),
        (settings(models={"fast": (("gone", 1.0),)}), "models.fast: no unit lists gone"),
        (
            settings(Unit("a2", "a", "http://b:1", nodes=(Node("n", Role.LEADER, agent="10.0.0.1:9911"),))),
            "agents such as 10.0.0.1:9911 are on other machines and want a token",
        ),
    ],
)
def test_what_cannot_be_meant_is_a_warning(wrong: Settings, says: str) -> None:
    (line,) = warnings_of(wrong)
    assert line.startswith(says)


def test_what_may_be_meant_is_none() -> None:
    meant = settings(
        Unit("a2", "a", "http://127.0.0.1:8101"),
        trusted=("10.0.0.0/8",),
        models={"fast": (("m", 1.0),), "new": (("loaded-later", 1.0),)},
    )
    assert list(warnings_of(meant)) == [], "a2 says itself what it serves"
