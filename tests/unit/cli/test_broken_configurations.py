"""A first configuration goes wrong in these ways: `check` gives one line that says where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.proxy.cli.main import main

GOOD = "cells: [{name: a, units: [{name: a1, url: 'http://10.0.0.1:8000'}]}]\n"
UNIT = "cells:\n- name: a\n  units:\n  - name: a1\n    url: http://10.0.0.1:8000\n"
BROKEN: list[tuple[str, str]] = [
    # YAML.
    ("", ": expected a mapping such as 'cells: [...]', found an empty file"),
    ("- a\n", ": expected a mapping such as 'cells: [...]', found a list"),
    (
        "cells:\n\t- name: a\n",
        ":2:1: expected YAML, found character '\\t' that cannot start any token; indent with",
    ),
    ("cells: [{name: a, units: [}]\n", ":1:27: expected YAML, "),
    ("listen: a: b\n", ":1:10: expected YAML, mapping values are not allowed here"),
    (GOOD + "policy: p2c\npolicy: random\n", ": policy: duplicate key, again in line 3"),
    (
        GOOD + "listen: ${LISTEN}\n",
        ":2:9: the variable LISTEN is not set; set it, or write ${LISTEN:-DEFAULT}",
    ),
    (GOOD + "tls: {cert: ${CERT}}\n", ":2:14: expected YAML, "),
    # Where things stand.
    (
        "policy: p2c\n",
        ": cells: expected at least one cell with a unit, found none; add units to the file, or",
    ),
    ("cells: {a: {units: []}}\n", ": cells: expected a list, found a mapping; begin each item with '- '"),
    (
        "cells:\n- name: a\n  units: [http://x:1]\n",
        ": cells[0].units[0]: expected a mapping, found 'http://x:1'; wri",
    ),
    ("cells:\n- units: [{name: a, url: 'http://x'}]\n", ": cells[0].name: required key is missing"),
    ("cells:\n- name: a\n  units: [{name: a1}]\n", ": cells[0].units[0].url: required key is missing"),
    ("cells:\n- name: a\n", ": cells[0].units: required key is missing"),
    (GOOD + "unit: []\n", ": unit: unknown key; did you mean 'cells[].discover.unit'?"),
    (GOOD + "polcy: p2c\n", ": polcy: unknown key; did you mean 'policy'?"),
    (GOOD + "connect_s: 3\n", ": connect_s: unknown key; did you mean 'timeouts.connect_s'?"),
    (GOOD + "admin_token: secret\n", ": admin_token: unknown key; did you mean 'admin_token_file'?"),
    (UNIT + "    api_key: sk-1\n", ": cells[0].units[0].api_key: unknown key; did you mean 'api_key_file'?"),
    # Values.
    (
        GOOD + "listen: 8000\n",
        ": listen: expected HOST:PORT, with an IPv6 host in brackets, found 8000; did you mean",
    ),
    (
        GOOD + "listen: ':8000'\n",
        ": listen: expected HOST:PORT, with an IPv6 host in brackets, found ':8000'; did",
    ),
    (
        GOOD + "admin: 127.0.0.1:8000\n",
        ": admin: 127.0.0.1:8000 is taken by listen (127.0.0.1:8000); choose another",
    ),
    (GOOD + "policy: prefix\n", ": policy: expected a policy: least_load, p2c, prefix_affinity, "),
    (GOOD + "access_log: text\n", ": access_log: expected a format: console, json, off, found 'text'"),
    (
        GOOD + "timeouts: {drain_s: 5m}\n",
        ": timeouts.drain_s: expected a number of seconds, 0 or more, found '5m'; did",
    ),
    (GOOD + "workers: '2'\n", ": workers: expected a whole number from 1, found '2'; leave the quotes out"),
    (
        GOOD + "limits: {body_bytes: 64MB}\n",
        ": limits.body_bytes: expected a size: bytes as a whole number, or a st",
    ),
    (GOOD + "rules: {attempts: 0}\n", ": rules.attempts: expected a whole number from 1, found 0"),
    (
        GOOD + "tls: {cert: no.pem}\n",
        ": tls.cert: expected a readable file, found 'no.pem': No such file or directory",
    ),
    (
        GOOD + "headers: {session: x-a}\n",
        ": headers: is gone: session_header: NAME is what can still be chosen",
    ),
    (
        UNIT.replace("http://", ""),
        ": cells[0].units[0].url: expected http://HOST:PORT or https://HOST:PORT without a",
    ),
    (
        UNIT.replace(":8000", ":8000/v1"),
        ": cells[0].units[0].url: expected http://HOST:PORT or https://HOST:PORT wi",
    ),
    (
        UNIT + "    models: llama\n",
        ": cells[0].units[0].models: expected a list of model names, found 'llama'; did you",
    ),
    (UNIT + "    engine: vllm-openai\n", ": cells[0].units[0].engine: expected an engine: "),
    (
        UNIT + "    nodes: [n0, n1]\n",
        ": cells[0].units[0].nodes[0]: expected a mapping, found 'n0'; write {name: n0, …}",
    ),
    (
        UNIT + "    nodes: [{name: n, role: follower}]\n",
        ": cells[0].units[0].nodes: expected exactly one node with ",
    ),
    (
        "cells: [{name: a, discover: {from: k8s, name: big, port: 1}}]\n",
        ": cells[0].discover.from: expected a sour",
    ),
    (
        "cells: [{name: a, discover: {from: lws, port: 8000}}]\n",
        ": cells[0].discover: from: lws requires name",
    ),
]


@pytest.mark.parametrize(("text", "line"), BROKEN, ids=range(len(BROKEN)))
def test_it_is_a_line_with_its_place(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cellgate.yaml"
    file.write_text(text)
    assert main(["check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, *more = err.splitlines()
    assert first.startswith(f"{file}{line}")
    # Only a list of names has more than one mistake.
    assert len(more) == text.count(", n1]")
