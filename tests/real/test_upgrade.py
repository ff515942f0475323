"""The last release and this version on one Redis, under load, forward and back."""

from __future__ import annotations

import pytest

from loadtests import last_release, upgrade
from tests.real.programs import find

pytestmark = pytest.mark.nightly


def test_gates_are_rolled_to_this_version_and_back_and_no_request_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not last_release.is_here():
        pytest.skip(f"a shallow clone: {last_release.name()} is not in it; git fetch --unshallow --tags")
    find("haproxy")
    find("redis-server")
    code = upgrade.main(["--between-s", "1"])
    assert code == 0, capsys.readouterr().out
