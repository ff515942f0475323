"""`cellgate keys new` and `cellgate keys usage`."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from cellgate.proxy.admission.limits import UsageRecord
from cellgate.proxy.admission.usage import UsageRow, usage_line
from cellgate.proxy.cli.main import main
from cellgate.proxy.config.key_file import read_keys

JULY = 1_751_328_000.0
"""2025-07-01T00:00:00Z."""
BILL = UsageRecord("r", "alice", "team", "tiny", "tiny", "chat", 200, 0.0, 0, 0, 30, 12, False)


def test_a_new_key_is_shown_once_and_its_line_is_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text('{"tenant": "team"}')
    options = "--tenant", "team", "--model", "tiny", "--expires", "2030-01-01"
    assert main(["keys", "new", "alice", "--file", str(file), *options]) == 0
    shown = capsys.readouterr().out.strip()
    key = read_keys(str(file)).keys[sha256(shown.encode()).digest()]
    assert (key.name, key.tenant.name, key.models) == ("alice", "team", frozenset({"tiny"}))
    assert shown not in file.read_text()
    assert main(["keys", "new", "alice", "--file", str(file)]) == 1
    assert capsys.readouterr().err == f"cellgate: {file}:3: key: duplicate key 'alice'\n"
    assert len(file.read_text().splitlines()) == 2


def test_without_a_file_its_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "bob"]) == 0
    shown, line = capsys.readouterr().out.splitlines()
    assert json.loads(line.partition(": ")[2]) == {"key": "bob", "sha256": sha256(shown.encode()).hexdigest()}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A usage log with a line that is cut off."""
    file = tmp_path / "usage.jsonl"
    rows = [
        usage_line(JULY - 1.0, UsageRow(BILL, 1.0)),
        usage_line(JULY, UsageRow(BILL, 0.5)),
        b'{"time": "2025-07\n',
        usage_line(JULY + 1.0, UsageRow(BILL._replace(key="bob", is_estimated=True), 0.25)),
    ]
    file.write_bytes(b"".join(rows))
    return file


def test_usage_is_added_up_from_a_time_on(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "usage", str(log), "--since", "2025-07-01"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["TENANT", "REQUESTS"]
    assert row.split() == ["team", "2", "60", "24", "0.750000", "1"]


def test_usage_by_key_for_programs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "usage", str(log), "--by", "key", "--json", "--until", "2025-07-01T00:00:01Z"]) == 0
    assert {name: total["requests"] for name, total in json.loads(capsys.readouterr().out).items()} == {
        "alice": 2
    }
    assert main(["keys", "usage", str(log / "none")]) == 1
    with pytest.raises(SystemExit):
        main(["keys", "usage", str(log), "--since", "July"])
