"""What is wrong with a file, a URL, a fleet or a flag gets one line. `…` stands for any words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.settings import RedisSource
from cellgate.router.nouns import Cell, Fleet
from tests.unit.config.files import CELLS, problems, read, same


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://x:1/v1", "http://x:1"),
        ("http://x/v1/", "http://x"),
        ("http://x?y", "http://x"),
        ("http://x#y", "http://x"),
        ("HTTPS://X:1//v1", "https://x:1"),
        ("ftp://x", None),
        ("http://", None),
        ("http://x:0", None),
        ("http://10.0.0.256", None),
        ("http://[::g]", None),
        ("", None),
    ],
)
def test_a_bad_url_gets_one_line_with_what_was_meant(tmp_path: Path, url: str, meant: str | None) -> None:
    (line,) = problems(tmp_path, f"cells: [{{name: a, units: [{{name: a, url: '{url}'}}]}}]")
    expected = f"expected http://HOST:PORT or https://HOST:PORT without a path, found '{url}'"
    hint = f"; did you mean '{meant}'?…" if meant else ""
    assert same(line, f"gate.yaml: cells[0].units[0].url: {expected}{hint}")


def test_a_url_with_a_password_is_not_shown(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "cells: [{name: a, units: [{name: a, url: 'http://u:s3cret@x'}]}]")
    assert same(line, "gate.yaml: cells[0].units[0].url: …, found a URL with '@' (not shown, …)")
    assert "s3cret" not in line


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", ": expected a mapping such as 'cells: [...]', found an empty file"),
        (b"# only this\n", ": expected a mapping such as 'cells: [...]', found an empty file"),
        (b"- a\n", ": expected a mapping such as 'cells: [...]', found a list"),
        (b"a: 1\nb: c: d\n", ":2:5: expected YAML, mapping values are not allowed here"),
        (b"a: 1\n---\nb: 1\n", ":2:1: expected YAML, but found another document"),
        (b"a: !!python/object:os.system {}", ":1:4: expected YAML, could not determine a constructor …"),
        (b"a: 1\nb: \xff\n", ":2:4: expected UTF-8, found byte 0xff"),
        (b"a: 1\n b\x01", ":2:3: expected printable text, found '\\x01'"),
        (b"a: 2001-99-99", ": expected plain YAML without deep nesting: month must be in 1..12"),
        (b"- " * 600, ": expected plain YAML without deep nesting: maximum recursion …"),
    ],
)
def test_a_file_that_is_no_mapping_gets_one_line(tmp_path: Path, data: bytes, problem: str) -> None:
    (line,) = problems(tmp_path, data)
    assert same(line, f"gate.yaml{problem}")


def test_a_missing_file_gets_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere.yaml: expected a readable file: No such file"):
        load("nowhere.yaml", Overrides())


@pytest.mark.parametrize("cells", ["", "cells: []", "cells: [{name: a, units: []}]"])
def test_a_fleet_without_units_is_refused(tmp_path: Path, cells: str) -> None:
    (line,) = problems(tmp_path, f"policy: random\n{cells}")
    assert line.startswith("gate.yaml: cells: expected at least one cell with a unit, found none; add units")


def test_a_fleets_router_has_the_units_of_others(tmp_path: Path) -> None:
    text = "discovery: redis\nredis: redis://r:6379/0\nadvertise: http://10.0.0.1:8000"
    for cells in ("", "\ncells: [{name: east, weight: 2, units: []}]"):
        settings = read(tmp_path, text + cells)
        assert settings.sources == (RedisSource(),)
        assert settings.advertise == "http://10.0.0.1:8000"
    assert settings.fleet == Fleet(cells=(Cell("east", 2.0),))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("discovery: redis", "discovery: requires the key redis as well"),
        (
            "redis: redis://r:6379/0\ndiscovery: dns",
            "discovery: expected a source of all units: redis, found 'dns'",
        ),
        (
            "redis: redis://r:6379/0\ndiscovery: redis\ncells: [{name: a, units: [{name: u, url: 'http://u:1'}]}]",
            "cells: with discovery: redis, cells must not have units of their own",
        ),
    ],
)
def test_a_fleets_router_needs_redis_and_nothing_of_its_own(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text)[0] == f"gate.yaml: {problem}"


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = """
policy: best
policy: worst
listen: here
listen: there
cells:
  - {name: a, weight: 0, units: [{name: u, url: 'http://x'}, {name: u, url: 'http://x'}]}
  - {name: a, units: 3}
timeouts: {connect_s: fast}
"""
    lines = problems(tmp_path, text, listen="here")
    assert [re.match(r"(.*?): (expected|duplicate)", line)[1] for line in lines] == [  # type: ignore[index]
        "gate.yaml: policy",
        "gate.yaml: listen",
        "gate.yaml: cells[1].name",
        "gate.yaml: cells[0].units[1].name",
        "gate.yaml: cells[0].units[1].url",
        "--listen",
        "gate.yaml: policy",
        "gate.yaml: cells[0].weight",
        "gate.yaml: cells[1].units",
        "gate.yaml: timeouts.connect_s",
    ]


def test_what_is_wrong_with_flags_names_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            None, Overrides(policy="p3c", units=("a=http://x", "a=y:1")), {"CELLGATE_ADMIN_TOKEN": "s3 cret"}
        )
    assert caught.value.problems == (
        "--unit: duplicate name 'a'",
        "--policy: expected a policy: least_load, p2c, prefix_affinity, random, round_robin, session, found "
        "'p3c'; did you mean 'p2c'?",
        "--unit: expected http://HOST:PORT or https://HOST:PORT without a path, found 'y:1'; did you mean 'http://y:1'?",
        "CELLGATE_ADMIN_TOKEN: expected a token of visible ASCII characters, found other characters",
    )


def test_aliases_are_walked_once(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 40))
    assert len(problems(tmp_path, f"{CELLS}loop: &loop [*loop]\n{bomb}")) == 41


def test_a_certificate_must_match_its_key(tmp_path: Path) -> None:
    for name in ("one", "two"):
        new = (
            f"openssl req -x509 -newkey ed25519 -nodes -subj /CN=x -keyout {name}.key -out {name}.pem".split()
        )
        subprocess.run(new, cwd=tmp_path, check=True, capture_output=True, timeout=20)
    tls = f"tls: {{cert: {tmp_path}/one.pem, key: {tmp_path}/%s.key, ca: {tmp_path}/two.pem}}"
    assert read(tmp_path, CELLS + tls % "one").tls.key == f"{tmp_path}/one.key"
    (line,) = problems(tmp_path, CELLS + tls % "two")
    assert line.startswith(
        "gate.yaml: tls: expected a certificate in cert and its key in key, in PEM format, found a file that "
    )
