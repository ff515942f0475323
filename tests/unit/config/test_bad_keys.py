"""Each bad key of a configuration file gets one line. In what is expected, `…` stands for any words."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.proxy.config.load_process import ConfigError
from tests.unit.config.files import CELLS, probes_of, problems, same


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
        ("listen: '::1:8000'", "listen: expected HOST:PORT, with an IPv6 host in brackets, found '::1:8000'"),
        ("admin: a:65536", "admin: expected HOST:PORT, with an IPv6 host in brackets, found 'a:65536'"),
        ("admin: 127.0.0.1:8000", "admin: 127.0.0.1:8000 is taken by listen (127.0.0.1:8000); …"),
        ("admin: 0.0.0.0:8000", "admin: 0.0.0.0:8000 is taken by listen (127.0.0.1:8000); …"),
        ("agent_check: 127.0.0.1:9901", "agent_check: 127.0.0.1:9901 is taken by admin (127.0.0.1:9901); …"),
        ("pass_unlisted: 1", "pass_unlisted: expected true or false, found 1"),
        ("rules:", "rules: expected a mapping, found nothing"),
        ("limits: 3", "limits: expected a mapping, found 3"),
        ("timeouts: {connect_s: 0}", "timeouts.connect_s: expected a number of seconds above 0, found 0"),
        ("timeouts: {connect_s: .nan}", "timeouts.connect_s: …, found nan"),
        ("timeouts: {connect_s: .inf}", "timeouts.connect_s: …, found inf"),
        ("timeouts: {connect_s: yes}", "timeouts.connect_s: …, found true"),
        ("timeouts: {drain_s: -1}", "timeouts.drain_s: expected a number of seconds, 0 or more, found -1"),
        ("rules: {attempts: 1.5}", "rules.attempts: expected a whole number from 1, found 1.5"),
        ("rules: {degraded_ratio: 2}", "rules.degraded_ratio: is no setting any more: the gate uses 1.25"),
        ("queue: {age_s: 30}", "queue.age_s: is no setting any more: the gate uses 8 s"),
        ("queue: {age_tokens: 3}", "queue.age_tokens: is no setting any more: the gate uses 32768 tokens"),
        (
            "guardrail: {url: 'http://x/y', window_bytes: 1KiB}",
            "guardrail.window_bytes: is no setting any more: the gate uses 2048 bytes",
        ),
        (
            "tracing: {endpoint: 'http://c/v1/traces', sample_ratio: 1.1}",
            "tracing.sample_ratio: … a share from 0 to 1, found 1.1",
        ),
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
        (
            "tls: {unit_cert: /dev/null}",
            "tls: unit_cert and unit_key must be given together: unit_key is missing",
        ),
        ("tls: {ca: /dev/null}", "tls: expected CA certificates in ca, in PEM format, found …"),
        ("tls: {admin_client_ca: /etc/hostname}", "tls: expected CA certificates in admin_client_ca, …"),
        ("models: [a]", "models: expected a mapping of names, …, found a list"),
        ("models: {a: {v1: 95, v2: -5}}", "models: a: expected a weight above 0 (1 is usual) for each model"),
        ("models: {a: b, b: c}", "models: a: 'b' is a name of this list as well; …"),
        ("models: {a: 3}", "models: a: expected the name of a model, or models with weights …"),
        ("fallback: {a: [a]}", "fallback: a: expected each name once, and not 'a' itself"),
        ("fallback: {a: 3}", "fallback: a: expected a list of names"),
        ("internal_headers: none", "internal_headers: expected who gets them: trusted, all, found 'none'"),
        ("cors: {origins: https://a}", "cors.origins: expected a list of origins …, found 'https://a'"),
        ("cors: {origins: [https://a/b]}", "cors.origins: expected a list of origins …, found a list"),
        ("cors: {}", "cors.origins: required key is missing"),
        ("guardrail: {url: /run/x}", "guardrail.url: expected http://HOST:PORT/PATH …, found '/run/x'"),
        ("guardrail: {url: 'unix:x'}", "guardrail.url: expected unix:///PATH of a socket, found 'unix:x'"),
        (
            "guardrail: {url: 'unix:///x', fail: maybe}",
            "guardrail.fail: expected what follows without a verdict: open, closed, found 'maybe'",
        ),
        (
            "guardrail: {url: 'unix:///x', answer: some}",
            "guardrail.answer: expected how it sees answers: off, whole, windows, found 'some'",
        ),
        ("realtime: 1", "realtime: expected true or false, found 1"),
        ("admin_token: s3cret", "admin_token: unknown key; did you mean 'admin_token_file'?"),
        ("redis: 6379", "redis: expected a string, found 6379"),
        ("redis_prefix: '*'", "redis_prefix: expected a prefix of at most 64 letters, …, found '*'"),
        ("redis_password: s3cret", "redis_password: …; did you mean 'redis_password_file'?"),
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
        ("max_in_flight: 0", "max_in_flight: expected a whole number from 1, found 0"),
        ("engine: vlm", "engine: expected an engine: …, found 'vlm'; did you mean 'vllm'?"),
        ("canary: chatt", "canary: expected a canary: …, found 'chatt'; did you mean 'chat'?"),
        ("metrics_url: 'http://x:1'", "metrics_url: …, found 'http://x:1'; add the path, …"),
        ("api_key: s3cret", "api_key: unknown key; did you mean 'api_key_file'?"),
        ("api_key_file: no.key", "api_key_file: expected a readable file, found 'no.key': No such file …"),
        (
            "nodes: [{name: n, role: leader, agent: x}]",
            "nodes[0].agent: expected HOST:PORT, with an IPv6 host in brackets, found 'x'",
        ),
        ("models: m", "models: expected a list of model names, found 'm'; did you mean [m]?"),
        ("models: [m, m]", "models: duplicate model in 'm', 'm'"),
        ("nodes: []", "nodes: expected exactly one node with role: leader, found 0"),
        ("nodes: [{name: n, role: follower}]", "nodes: expected exactly one node with role: leader, found 0"),
        ("nodes: [{name: n, role: leder}]", "nodes[0].role: expected a role: …; did you mean 'leader'?"),
        (
            "nodes: [{name: n, role: leader}, {name: n, role: follower}]",
            "nodes[1].name: duplicate name 'n'",
        ),
    ],
)
def test_a_bad_unit_gets_one_line(tmp_path: Path, rest: str, problem: str) -> None:
    name = "" if rest.startswith("name:") else "name: a, "
    (line,) = problems(tmp_path, f"cells: [{{name: a, units: [{{{name}url: http://x, {rest}}}]}}]")
    assert same(line, f"gate.yaml: cells[0].units[0].{problem}")


PAGE = "url: 'http://x/m'"


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        ("probe: htpp", "[0].probe: expected a probe: exporter, grpc, http, tcp, …; did you mean 'http'?"),
        (PAGE, "[0].probe: required key is missing"),
        ("probe: tcp", "[0]: probe: tcp requires address"),
        (
            f"probe: tcp, address: 'x:1', {PAGE}",
            "[0]: probe: tcp does not take url; it takes …address…",
        ),
        (
            "probe: tcp, address: 'x:0'",
            "[0].address: expected HOST:PORT with a port from 1 to 65535, found 'x:0'",
        ),
        ("probe: tcp, adress: 'x:1'", "[0].adress: unknown key; did you mean 'address'?"),
        (
            "probe: http, url: 'http://x'",
            "[0].url: …, found 'http://x'; add the path, such as …/health…",
        ),
        ("probe: http, url: 'http://u:s3cret@x/'", "[0].url: …, found a URL with '@' (not shown, …)"),
        ("probe: http, url: '/health'", "[0].url: expected http://HOST:PORT/PATH …, found '/health'"),
        (
            "probe: http, url: 'http://x/a b'",
            "[0].url: expected http://HOST:PORT/PATH …, found 'http://x/a b'",
        ),
        (f"probe: http, {PAGE}, expect: [204]", "[0].expect: is gone: 200 to 299 are good"),
        (
            f"probe: http, {PAGE}, timeout_s: 0",
            "[0].timeout_s: is gone: a probe may take 3 s",
        ),
        (
            "probe: grpc, address: 'x:1', service: ''",
            "[0].service: expected a service name, …, found ''",
        ),
        (f"probe: exporter, {PAGE}", "[0]: expected either rule or preset, found neither"),
        (
            f"probe: exporter, {PAGE}, preset: dcgm, rule: x > 1",
            "[0]: expected either rule or preset, found both",
        ),
        (f"probe: exporter, {PAGE}, preset: dgcm", "[0].preset: expected a preset: …; did you mean 'dcgm'?"),
        (f"probe: exporter, {PAGE}, rule: x => 1", "[0].rule: expected a rule such as …; did you mean '>='?"),
        (f"probe: exporter, {PAGE}, rule: 3", "[0].rule: expected a rule such as …, found 3"),
    ],
)
def test_a_bad_probe_gets_one_line(tmp_path: Path, probe: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        probes_of(tmp_path, probe)
    (line,) = caught.value.problems
    assert same(line, f"{tmp_path}/gate.yaml: cells[0].units[0].nodes[0].probes{problem}")
    assert "s3cret" not in line


def test_two_probes_of_a_node_look_at_different_things(tmp_path: Path) -> None:
    one = "probe: http, url: 'http://x/m?token=s3cret'"
    with pytest.raises(ConfigError) as caught:
        probes_of(tmp_path, one, one)
    (line,) = caught.value.problems
    assert same(line, "….probes: duplicate probe 'http x/m'")


def test_a_key_left_out_gets_one_line(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "cells: [{name: a, units: [{name: a}]}]")
    assert line == "gate.yaml: cells[0].units[0].url: required key is missing"
