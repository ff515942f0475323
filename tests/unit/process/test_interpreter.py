"""An interpreter that makes everything slower is told of once."""

from __future__ import annotations

from cellgate.proxy.process.memory import slow_build


def test_a_python_built_without_profiles_is_told_of() -> None:
    assert "10 to 20 % more CPU" in slow_build("'--prefix=/opt/python'", "/opt/python")


def test_others_are_not() -> None:
    assert not slow_build("'--enable-optimizations' '--with-lto'", "/usr/local")
    assert not slow_build("'--enable-shared' '--prefix=/usr'", "/usr"), "Debian's says it otherwise"
    assert not slow_build("", "C:/Python"), "nothing is known"
