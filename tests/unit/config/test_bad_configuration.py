"""What is wrong with a configuration gets one line. In what is expected, `…` stands for any word."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cellgate.proxy.config import units
from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.sources import RedisSource
from cellgate.proxy.config.units import UnitKeys, unit_of
from cellgate.router.nouns import Cell, Fleet, KvEvents
from tests.extras import needs
from tests.unit.config.files import CELLS, lines, probes_of, problems, read, same, without_line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("polcy: x", "polcy: unknown key; did you mean 'policy'?"),
        ("connect_s: 3", "connect_s: unknown key; did you mean 'timeouts.connect_s'?"),
        ("rules: {xyz: 3}", "rules.xyz: unknown key; known here: canary_idle_s, …"),
        ("1: x", "1: expected a string as the key, found 1; put it in quotes"),
        ('"q\\nz": x', "'q\\nz': unknown key; known here: listen, …"),
        ("policy: least_laod", "policy: expected a policy: least_load, …; did you mean 'least_load'?"),
        ("access_log: on", "access_log: expected a format: console, json, off, found true"),
        ("listen: 8000", "listen: expected HOST:PORT, …, found 8000; did you mean '127.0.0.1:8000'?"),
        (
            "listen: ':8000'",
            "listen: expected HOST:PORT, with an IPv6 host in brackets, found ':8000'; did …",
        ),
        ("listen: '::1:8000'", "listen: expected HOST:PORT, with an IPv6 host in brackets, found '::1:8000'"),
        ("admin: a:65536", "admin: expected HOST:PORT, with an IPv6 host in brackets, found 'a:65536'"),
        ("admin: 0.0.0.0:8000", "admin: 0.0.0.0:8000 is taken by listen (127.0.0.1:8000); …"),
        ("agent_check: 127.0.0.1:9901", "agent_check: 127.0.0.1:9901 is taken by admin (127.0.0.1:9901); …"),
        ("pass_unlisted: 1", "pass_unlisted: expected true or false, found 1"),
        ("rules:", "rules: expected a mapping, found nothing"),
        ("limits: 3", "limits: expected a mapping, found 3"),
        ("timeouts: {connect_s: 0}", "timeouts.connect_s: expected a number of seconds above 0, found 0"),
        ("timeouts: {connect_s: .nan}", "timeouts.connect_s: …, found nan"),
        ("timeouts: {connect_s: .inf}", "timeouts.connect_s: …, found inf"),
        ("timeouts: {connect_s: yes}", "timeouts.connect_s: …, found true"),
        ("timeouts: {drain_s: 5m}", "timeouts.drain_s: expected a number …, found '5m'; did you mean 300?…"),
        ("workers: '2'", "workers: expected a whole number from 1, found '2'; leave the quotes out"),
        ("timeouts: {drain_s: -1}", "timeouts.drain_s: expected a number of seconds, 0 or more, found -1"),
        ("rules: {attempts: 1.5}", "rules.attempts: expected a whole number from 1, found 1.5"),
        ("tracing: true", "tracing: expected a mapping, found true"),
        ("tracing: {}", "tracing.endpoint: required key is missing"),
        ("tracing: {endpoint: 'http://c:4318'}", "tracing.endpoint: …; did you mean '…:4318/v1/traces'?"),
        ("tracing: {endpoint: 'http://s3cret@c:1/v1/traces'}", "tracing.endpoint: …(not shown, it may hold…"),
        ("tracing: {endpoint: 'grpc://c:1'}", "tracing.endpoint: expected http://HOST:PORT/PATH …"),
        (
            "tracing: {endpoint: 'http://c/v1/traces', sample_ratio: 1.1}",
            "tracing.sample_ratio: … a share from 0 to 1, found 1.1",
        ),
        (
            "session_headers: x-a",
            "session_headers: … a list of at most 16 header names, such as x-session-id, found 'x-a'; "
            "did you mean [x-a]?",
        ),
        ("rules: {passes: 3}", "rules.passes: unknown key; known here: canary_idle_s, …"),
        ("limits: {body_bytes: 64MB}", "limits.body_bytes: expected a size: …; did you mean '64MiB'?"),
        (
            "limits: {body_bytes: 2MiB, bodies_bytes: 1MiB}",
            "limits: body_bytes (2097152) must not be larger than bodies_bytes (1048576), …",
        ),
        ("limits: {body_bytes: 1, body_bytes: 2}", "limits.body_bytes: duplicate key, again in line 2"),
        (
            "tls: {cert: no.pem}",
            "tls.cert: expected a readable file, found 'no.pem': No such file or directory",
        ),
        ("tls: {key: /dev/null}", "tls: cert and key must be given together: cert is missing"),
        ("tls: {ca: /dev/null}", "tls: expected CA certificates in ca, in PEM format, found …"),
        ("models: [a]", "models: expected a mapping of names, …, found a list"),
        ("models: {a: {v1: 95, v2: -5}}", "models: a: expected a weight above 0 (1 is usual) for each model"),
        ("models: {a: b, b: c}", "models: a: 'b' is a name of this list as well; …"),
        ("models: {a: 3}", "models: a: expected the name of a model, or models with weights …"),
        ("fallback: {a: [a]}", "fallback: a: expected each name once, and not 'a' itself"),
        ("fallback: {a: 3}", "fallback: a: expected a list of names"),
        ("internal_headers: none", "internal_headers: expected who gets them: trusted, all, found 'none'"),
        (
            "cors: {origins: https://a}",
            "cors.origins: expected a list of …, found 'https://a'; did you mean …?",
        ),
        ("cors: {origins: [https://a/b]}", "cors.origins[0]: expected an origin …; did you mean https://a?"),
        ("guardrail: {url: /run/x}", "guardrail.url: expected http://HOST:PORT/PATH …, found '/run/x'"),
        ("guardrail: {url: 'unix:x'}", "guardrail.url: expected unix:///PATH of a socket, found 'unix:x'"),
        (
            "guardrail: {url: 'unix:///x', fail: maybe}",
            "guardrail.fail: expected what follows without a verdict: open, closed, found 'maybe'",
        ),
        ("admin_token: s3cret", "admin_token: unknown key; did you mean 'admin_token_file'?"),
        ("redis: 6379", "redis: expected a string, found 6379"),
        ("redis_prefix: '*'", "redis_prefix: expected a prefix of at most 64 letters, …, found '*'"),
        ("admin_token_file: /dev/null", "admin_token_file: expected a token of …, found none"),
    ],
)
def test_a_bad_key_gets_one_line(tmp_path: Path, text: str, problem: str) -> None:
    (line,) = problems(tmp_path, CELLS + text)
    assert same(line, f"gate.yaml: {problem}")
    assert "s3cret" not in line


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("name: 1", "name: expected a name of …, found 1; put it in quotes"),
        ("name: a/b", "name: expected a name of at most 128 letters, digits, '.', '_' and '-', found 'a/b'"),
        ("weight: 0", "weight: expected a weight above 0 (1 is usual), found 0"),
        ("engine: vlm", "engine: expected an engine: …, found 'vlm'; did you mean 'vllm'?"),
        ("metrics_url: 'http://x:1'", "metrics_url: …, found 'http://x:1'; add the path, …"),
        ("api_key_file: no.key", "api_key_file: expected a readable file, found 'no.key': No such file …"),
        ("models: m", "models: expected a list of model names, found 'm'; did you mean [m]?"),
        ("models: [m, m]", "models: duplicate model in 'm', 'm'"),
        ("nodes: [n0]", "nodes[0]: expected a mapping, found 'n0'; write {name: n0, …}"),
        ("nodes: [{name: n, role: follower}]", "nodes: expected exactly one node with role: leader, found 0"),
        ("nodes: [{name: n, role: leder}]", "nodes[0].role: expected a role: …; did you mean 'leader'?"),
        ("nodes: [{name: n, role: leader}, {name: n, role: follower}]", "nodes[1].name: duplicate name 'n'"),
    ],
)
def test_a_bad_unit_gets_one_line(tmp_path: Path, rest: str, problem: str) -> None:
    name = "" if rest.startswith("name:") else "name: a, "
    (line,) = problems(tmp_path, f"cells: [{{name: a, units: [{{{name}url: http://x, {rest}}}]}}]")
    assert same(line, f"gate.yaml: cells[0].units[0].{problem}")


PAGE = "url: 'http://x/m'"


def exporter(rest: str, problem: str) -> Any:
    return pytest.param(f"probe: exporter, {PAGE}{rest}", problem, marks=needs("node_probes"))


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        ("probe: htpp", "[0].probe: expected a probe: exporter, grpc, http, tcp, …; did you mean 'http'?"),
        (PAGE, "[0].probe: required key is missing"),
        ("probe: tcp", "[0]: probe: tcp requires address"),
        (f"probe: tcp, address: 'x:1', {PAGE}", "[0]: probe: tcp does not take url; it takes …address…"),
        (
            "probe: tcp, address: 'x:0'",
            "[0].address: expected HOST:PORT with a port from 1 to 65535, found 'x:0'",
        ),
        ("probe: http, url: 'http://x'", "[0].url: …, found 'http://x'; add the path, such as …/health…"),
        ("probe: http, url: 'http://u:s3cret@x/'", "[0].url: …, found a URL with '@' (not shown, …)"),
        ("probe: http, url: '/health'", "[0].url: expected http://HOST:PORT/PATH …, found '/health'"),
        (f"probe: http, {PAGE}, expect: [204]", "[0].expect: unknown key; known here: probe, url, …"),
        ("probe: grpc, address: 'x:1', service: ''", "[0].service: expected a service name, …, found ''"),
        exporter("", "[0]: expected either rule or preset, found neither"),
        exporter(", preset: dcgm, rule: x > 1", "[0]: expected either rule or preset, found both"),
        (f"probe: exporter, {PAGE}, preset: dgcm", "[0].preset: expected a preset: …; did you mean 'dcgm'?"),
        exporter(", rule: x => 1", "[0].rule: expected a rule such as …; did you mean '>='?"),
        (f"probe: exporter, {PAGE}, rule: 3", "[0].rule: expected a rule such as …, found 3"),
    ],
)
def test_a_bad_probe_gets_one_line(tmp_path: Path, probe: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        probes_of(tmp_path, probe)
    (line,) = map(without_line, caught.value.problems)
    assert same(line, f"{tmp_path}/gate.yaml: cells[0].units[0].nodes[0].probes{problem}")
    assert "s3cret" not in line


def test_two_probes_of_a_node_look_at_different_things(tmp_path: Path) -> None:
    one = "probe: http, url: 'http://x/m?token=s3cret'"
    with pytest.raises(ConfigError) as caught:
        probes_of(tmp_path, one, one)
    (line,) = caught.value.problems
    assert same(line, "….probes of unit a: duplicate probe 'http x/m'")


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("units: [{name: a}]", "units[0].url: required key is missing"),
        ("weight: 2", "units: required key is missing…"),
        ("units: [{name: a, url: 'http://u:s3cret@x'}]", "units[0].url: …a URL with '@' (not shown, …)"),
        ("discover: [dns]", "discover: expected a mapping, found a list"),
        ("discover: {from: lsw}", "discover.from: expected a source: dns, ecs, …; did you mean 'lws'?"),
        ("discover: {from: lws, port: 8000}", "discover: from: lws requires name"),
        ("discover: {from: pods, port: 1}", "discover: from: pods requires either selector or pool"),
        ("discover: {from: pods, selector: a=b}", "discover: from: pods requires port, except with pool"),
        ("discover: {from: pods, selector: [], port: 1}", "discover.selector: expected labels of pods…"),
        (
            "discover: {from: lws, name: big, port: 8000, cluster: c}",
            "discover: from: lws does not take cluster; it takes name, port, namespace, agent_port, scheme, "
            "kubeconfig, places, unit",
        ),
        (
            "discover: {from: file, path: x, unit: {weight: 2}}",
            "discover: from: file does not take unit; it takes path",
        ),
        ("discover: {from: dns, host: a}", "discover: from: dns requires port, except with record: SRV"),
        (
            "discover: {from: dns, host: a, record: SRV, port: 80}",
            "discover: record: SRV does not take port: each record has its own",
        ),
        ("discover: {from: dns, host: a, record: srv}", "discover.record: expected a record type: A, …"),
    ],
)
def test_a_bad_cell_gets_one_line(tmp_path: Path, cell: str, problem: str) -> None:
    (line,) = problems(tmp_path, f"cells: [{{name: a, {cell}}}]")
    assert same(line, f"gate.yaml: cells[0].{problem}")
    assert "s3cret" not in line


@needs("clusters")
def test_a_missing_package_is_said_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = problems(tmp_path, "cells: [{name: a, discover: {from: lws, name: big, port: 8000}}]")
    assert line == (
        "gate.yaml: cells[0].discover: from: lws requires a package that is not installed: "
        + how_to_install("k8s")
    )


# What is wrong with a file, a URL, a fleet or a flag gets one line. `…` stands for any words.


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


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", ": expected a mapping such as 'cells: [...]', found an empty file"),
        (b"- a\n", ": expected a mapping such as 'cells: [...]', found a list"),
        (b"cells: {a: 1}\n", ": cells: expected a list, found a mapping; begin each item with '- '"),
        (b"cells:\n\t- name: a\n", ":2:1: expected YAML, found character '\\t' that …; indent with…"),
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


@needs("redis")
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
        ("", "cells: expected at least one cell with a unit, found none; add units…"),
        ("cells: []", "cells: expected at least one cell with a unit, found none; add units…"),
        ("cells: [{name: a, units: []}]", "cells: expected at least one cell with a unit, …; add units…"),
        ("discovery: redis", "discovery: requires the key redis as well"),
        pytest.param(
            "redis: redis://r:6379/0\ndiscovery: dns",
            "discovery: expected a source of all units: redis, found 'dns'",
            marks=needs("redis"),
        ),
        pytest.param(
            "redis: redis://r:6379/0\ndiscovery: redis\ncells: [{name: a, units: [{name: u, url: 'http://u:1'}]}]",
            "cells: with discovery: redis, cells must not have units of their own",
            marks=needs("redis"),
        ),
    ],
)
def test_a_gate_needs_units_and_a_fleets_router_redis_alone(tmp_path: Path, text: str, problem: str) -> None:
    assert same(problems(tmp_path, f"policy: random\n{text}")[0], f"gate.yaml: {problem}")


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
    assert line.endswith("; key is not the key of this certificate")
    swapped = f"tls: {{cert: {tmp_path}/one.key, key: {tmp_path}/one.pem}}"
    (line,) = problems(tmp_path, CELLS + swapped)
    assert line.endswith("; cert names a key and key a certificate: swap them")


def test_the_line_and_the_units_name_are_said_and_items_of_lists_are_named(tmp_path: Path) -> None:
    text = """
trusted: [127.0.0.1, 10.0.0.1/8,
  1]
cells:
- name: a
  units:
  - {name: a1, url: 'http://x:1', max_in_flight: '8'}
  - name: a2
    url: 'http://x:2'
    models:
    - m
    - 3
    nodes: [{name: n, role: leader, agent: x}]
  - {name: a3}
"""
    assert [line.partition(": expected")[0] for line in lines(tmp_path, text)] == [
        "gate.yaml:2: trusted[1]",
        "gate.yaml:3: trusted[2]",
        "gate.yaml:7: cells[0].units[0].max_in_flight of unit a1",
        "gate.yaml:12: cells[0].units[1].models[1] of unit a2",
        "gate.yaml:13: cells[0].units[1].nodes[0].agent of unit a2",
        "gate.yaml:14: cells[0].units[2].url of unit a3: required key is missing",
    ]
    assert lines(tmp_path, text)[0].endswith("found '10.0.0.1/8'; did you mean 10.0.0.0/8?")


def test_what_is_looked_at_last_is_not_found_last(tmp_path: Path) -> None:
    text = f"""
policy: best
{CELLS}
admin: 127.0.0.1:8000
tls: {{cert: /no/file, key: /no/file, unit_key: /dev/null, admin_client_ca: /etc/hostname}}
limits: {{body_bytes: 3MiB, bodies_bytes: 2MiB, xyz: 1}}
keys: {{file: {tmp_path}/keys}}
"""
    (tmp_path / "keys").write_text("- a")
    found = problems(tmp_path, text)
    for expected in (
        "gate.yaml: policy: …",
        "gate.yaml: admin: 127.0.0.1:8000 is taken by listen …",
        "gate.yaml: tls.cert: expected a readable file…",
        "gate.yaml: tls.key: expected a readable file…",
        "gate.yaml: tls: unit_cert and unit_key must be given together: unit_cert is missing",
        "gate.yaml: tls: expected CA certificates in admin_client_ca, …",
        "gate.yaml: tls: admin_client_ca needs admin_cert and admin_key…",
        "gate.yaml: limits.xyz: unknown key…",
        "gate.yaml: limits: body_bytes (3145728) must not be larger than bodies_bytes (2097152)…",
        "keys:1: expected a JSON object: …",
    ):
        assert sum(same(line, expected) for line in found) == 1, (expected, found)
    assert len(found) == 10


# Roles and transfers that cannot work are refused, with the reason.


def cell(transfer: str, *roles: str, more: str = "") -> str:
    units = ", ".join(
        f"{{name: u{number}, url: 'http://u{number}:1', role: {role}{more}}}"
        for number, role in enumerate(roles)
    )
    return f"cells: [{{name: c, transfer: {transfer}, units: [{units}]}}]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (cell("none", "prefill", "both"), "cells[0].units[0].role: role: prefill requires a transfer of …"),
        (cell("sglang", "decode", "decode"), "cells[0].transfer: cell c has no unit with role: prefill; …"),
        (cell("sglang", "prefill", "both"), "cells[0].transfer: cell c has no unit with role: decode; …"),
        (
            cell("sglang", "both"),
            "cells[0].transfer: cell c has no unit with role: prefill and none with role: decode; …",
        ),
        (
            cell("sglang", "prefill", "decode", more=", engine: vllm"),
            "cells[0].transfer: transfer: sglang requires sglang, and unit u0 is vllm",
        ),
        (
            cell("sglang", "prefill", "decode", more=", bootstrap_port: 0"),
            "cells[0].units[0].bootstrap_port: expected a port from 1 to 65535, …",
        ),
        (cell("nixl", "prefill", "prefill"), "cells[0].transfer: cell c has no unit for answers: …"),
        (cell("nixl", "decode", "decode"), "cells[0].transfer: cell c has no pair: …"),
        (cell("nixl", "both"), "cells[0].transfer: cell c has no pair: …"),
        (
            cell("nixl", "prefill", "decode", more=", engine: sglang"),
            "cells[0].transfer: transfer: nixl requires vllm, and unit u0 is sglang",
        ),
        (
            cell("nixl", "prefil", "decode"),
            "cells[0].units[0].role: expected a role: both, prefill, decode, …",
        ),
        (cell("infiniband", "prefill"), "cells[0].transfer: expected a transfer: none, nixl, sglang, …"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    found = problems(tmp_path, text)
    assert any(same(one, f"…{problem}") for one in found), found


@pytest.mark.parametrize(
    "roles", [("prefill", "decode"), ("both", "both"), ("prefill", "both"), ("both", "decode")]
)
def test_what_can_work_is_taken(tmp_path: Path, roles: tuple[str, ...]) -> None:
    cells = read(tmp_path, cell("nixl", *roles)).fleet.cells
    assert cells[0].transfer == "nixl"


def test_sglang_has_pairs_and_units_for_whole_requests(tmp_path: Path) -> None:
    fleet = read(tmp_path, cell("sglang", "prefill", "decode", "both", more=", bootstrap_port: 9000")).fleet
    assert fleet.cells[0].transfer == "sglang"
    assert [unit.bootstrap_port for unit in fleet.units] == [9000] * 3


# `kv_events` of a unit: what it takes, and what it refuses with a reason.


def read_kv_events(found: Any) -> KvEvents | None:
    keys = UnitKeys.model_validate({"name": "a", "url": "http://a:8000", "kv_events": found})
    return unit_of("c", keys, "").kv_events


@needs("kv_events")
def test_an_engine_alone_is_asked_for_its_endpoints_and_ranks_have_some_each() -> None:
    assert read_kv_events({"from": "sglang"}) == KvEvents("sglang")
    found = {"from": "vllm", "endpoint": "tcp://a:5557", "replay_endpoint": "tcp://a:6000", "ranks": 2}
    assert read_kv_events(found) == KvEvents("vllm", "tcp://a:5557", "tcp://a:6000", 2)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "Field required"),
        ({"from": "triton"}, "an engine"),
        ({"from": "vllm", "endpoint": "a:5557"}, "tcp://HOST:PORT"),
        ({"from": "vllm", "endpoint": "tcp://*"}, "HOST:PORT"),
        ({"from": "vllm", "ranks": 2}, "require endpoint"),
        ({"from": "vllm", "port": 2}, "Extra inputs"),
    ],
)
def test_what_is_wrong_is_told(found: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        read_kv_events(found)


@needs("kv_events")
def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object:
        return None if name == "zmq" else importlib.util.find_spec(name)

    monkeypatch.setattr(units, "find_spec", find_spec)
    with pytest.raises(ValidationError, match=r"install '\.\[kv-events\]'"):
        read_kv_events({"from": "vllm"})
