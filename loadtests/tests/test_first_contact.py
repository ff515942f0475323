"""The README, followed to the letter in a fresh clone."""

from __future__ import annotations

import pytest

from loadtests import first_contact


def test_all_that_the_readme_and_make_run_say_is_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_contact.main() == 0, capsys.readouterr().out
