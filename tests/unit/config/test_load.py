"""Configuration: what a file means, and that each thing that is wrong with it gets a line of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from cellgate.policies import POLICIES
from cellgate.probes.apis import CANARIES
from cellgate.probes.engines import ENGINES
from cellgate.probes.exporter import ExporterProbe
from cellgate.probes.grpc_health import GrpcProbe
from cellgate.probes.http_status import HttpProbe
from cellgate.probes.presets import PRESETS
from cellgate.probes.tcp_accept import TcpProbe
from cellgate.proxy.cli.tables import fleet_table
from cellgate.proxy.config.cgroup import cgroup_limits, quarter_of_memory
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.schema import SCHEMA
from cellgate.proxy.config.settings import KIB, MIB, Address, RedisAccess, Settings
from cellgate.proxy.config.sources import RedisSource
from cellgate.router.nouns import Cell, Fleet, Node, Role, Rules, Unit

ROOT = Path(__file__).parents[3]
GIVEN = Settings(fleet=Fleet())
UNIT = "{name: a1, url: 'http://10.0.0.1:8000'}"
CELLS = f"cells: [{{name: a, units: [{UNIT}]}}]\n"

FULL = """
listen: 0.0.0.0:80
admin: "[::1]:9000"
policy: p2c
access_log: console
cells:
  - name: a
    weight: 2
    units:
      - name: a1
        url: HTTP://Node-1:8000/
        weight: 0.5
        max_in_flight: 64
        models: [llama]
        nodes:
          - {name: a1-0, role: leader}
          - {name: a1-1, role: follower}
  - name: b
    units: []
rules: {canary_idle_s: 3, passes: 4}
limits: {body_bytes: 1MiB, bodies_bytes: 2000000}
timeouts: {connect_s: 0.5, drain_delay_s: 0}
pass_unlisted: true
"""


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ADMIN_TOKEN",
        "AGENT_TOKEN",
        "UNIT_API_KEY",
        "REDIS_USERNAME",
        "REDIS_PASSWORD",
        "WEBHOOK_SECRET",
    ):
        monkeypatch.delenv(f"CELLGATE_{name}", raising=False)


def read(tmp_path: Path, text: str | bytes, **flags: Any) -> Settings:
    path = tmp_path / "gate.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(str(path), Overrides(**flags))


def problems(tmp_path: Path, text: str | bytes, **flags: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **flags)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return [line.removeprefix(f"{tmp_path}/") for line in caught.value.problems]


# What a good file means.


def test_a_full_file_is_read_as_it_says(tmp_path: Path) -> None:
    settings = read(tmp_path, FULL)
    nodes = (Node("a1-0", Role.LEADER), Node("a1-1", Role.FOLLOWER))
    assert settings.fleet == Fleet(
        cells=(Cell("a", 2.0), Cell("b")),
        units=(Unit("a1", "a", "http://node-1:8000", ("llama",), 0.5, 64, nodes),),
    )
    assert (settings.listen, settings.admin) == (Address("0.0.0.0", 80), Address("::1", 9000))
    assert (settings.policy, settings.access_log, settings.pass_unlisted) == ("p2c", "console", True)
    assert settings.rules == Rules(canary_idle_s=3.0, passes=4)
    assert (settings.limits.body_bytes, settings.limits.bodies_bytes) == (MIB, 2_000_000)
    assert (settings.timeouts.connect_s, settings.timeouts.drain_delay_s) == (0.5, 0.0)


def test_a_file_of_units_only_gets_the_defaults(tmp_path: Path) -> None:
    settings = read(tmp_path, CELLS)
    assert settings.fleet.units[0].nodes == (Node("a1", Role.LEADER),)
    assert (settings.listen, settings.admin, settings.policy) == (GIVEN.listen, GIVEN.admin, GIVEN.policy)
    assert (settings.rules, settings.timeouts, settings.tls) == (GIVEN.rules, GIVEN.timeouts, GIVEN.tls)
    assert settings.limits.bodies_bytes == quarter_of_memory()


def test_a_bare_off_is_no_false_to_the_access_log(tmp_path: Path) -> None:
    assert read(tmp_path, CELLS + "access_log: off").access_log == "off"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    units = ("http://x:1", "big=https://[::1]:2/")
    settings = read(tmp_path, FULL, listen="127.0.0.1:0", policy="random", access_log="off", units=units)
    assert (settings.listen, settings.admin) == (Address("127.0.0.1", 0), Address("::1", 9000))
    assert (settings.policy, settings.access_log) == ("random", "off")
    assert settings.fleet.cells == (Cell("default"),)
    assert [(u.name, u.cell, u.url) for u in settings.fleet.units] == [
        ("unit-1", "default", "http://x:1"),
        ("big", "default", "https://[::1]:2"),
    ]


def test_flags_do_without_a_file() -> None:
    assert load(None, Overrides(units=("http://x:1",))).fleet.units[0].url == "http://x:1"


def test_every_policy_can_be_named(tmp_path: Path) -> None:
    assert [read(tmp_path, CELLS, policy=name).policy for name in POLICIES] == list(POLICIES)


def test_the_token_comes_from_the_environment_before_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    (tmp_path / "gate.yaml").write_text(CELLS + f"admin_token_file: {tmp_path}/token")
    path = str(tmp_path / "gate.yaml")
    assert load(path, Overrides(), {}).admin_token == "from-file"
    settings = load(path, Overrides(), {"CELLGATE_ADMIN_TOKEN": "from-env"})
    assert settings.admin_token == "from-env"
    assert "from-env" not in repr(settings)


def test_the_agents_token_comes_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text(CELLS)
    settings = load(str(tmp_path / "gate.yaml"), Overrides(), {"CELLGATE_AGENT_TOKEN": "s3cret"})
    assert settings.agent_token == "s3cret"
    assert "s3cret" not in repr(settings)
    assert load(str(tmp_path / "gate.yaml"), Overrides(), {}).agent_token is None


def test_a_gate_comes_to_redis_as_the_environment_says_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    rest = f"redis_username: me\nredis_password_file: {tmp_path}/secret\nredis_prefix: 'east:'"
    assert read(tmp_path, CELLS + rest).redis is None
    text = CELLS + "redis: redis://file:1\n" + rest
    assert read(tmp_path, text).redis == RedisAccess("redis://file:1", "me", "from-file", "east:")
    assert read(tmp_path, CELLS, redis="redis://flag:1").redis == RedisAccess("redis://flag:1")
    monkeypatch.setenv("CELLGATE_REDIS_USERNAME", "you")
    monkeypatch.setenv("CELLGATE_REDIS_PASSWORD", "from-env")
    settings = read(tmp_path, text, redis="redis://user:in-url@flag:1")
    assert settings.redis == RedisAccess("redis://user:in-url@flag:1", "you", "from-env", "east:")
    assert not any(secret in repr(settings) for secret in ("from-env", "in-url"))


def test_a_units_key_comes_from_its_file_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    one = f"{{name: a1, url: 'http://x:1', api_key_file: {tmp_path}/key}}"
    (tmp_path / "gate.yaml").write_text(
        f"cells: [{{name: a, units: [{one}, {{name: a2, url: 'http://x:2'}}]}}]"
    )
    settings = load(str(tmp_path / "gate.yaml"), Overrides(), {"CELLGATE_UNIT_API_KEY": "from-env"})
    assert [unit.api_key for unit in settings.fleet.units] == ["from-file", "from-env"]
    assert "from-" not in repr(settings) + fleet_table(settings.fleet)


def test_how_a_unit_is_probed_is_read_as_it_says(tmp_path: Path) -> None:
    (unit,) = read(
        tmp_path,
        """
cells:
  - name: a
    units:
      - name: a1
        url: http://x:1
        engine: triton
        canary: generate
        metrics_url: http://X:2/metrics?a=b
        nodes:
          - {name: n0, role: leader, agent: "[::1]:9902"}
          - name: n1
            role: follower
            probes:
              - {probe: http, url: https://n1/, expect: [204], period_s: 2, timeout_s: 0.5}
              - {probe: tcp, address: n1:29500}
              - {probe: grpc, address: n1:9000, service: a.B}
              - {probe: exporter, url: "http://n1:9400/metrics", preset: dcgm}
              - {probe: exporter, url: "http://n1:9400/metrics", rule: 'x{a="b"} > 1'}
""",
    ).fleet.units
    assert (unit.engine, unit.canary, unit.metrics_url) == ("triton", "generate", "http://x:2/metrics?a=b")
    assert unit.nodes == (
        Node("n0", Role.LEADER, "[::1]:9902"),
        Node(
            "n1",
            Role.FOLLOWER,
            probes=(
                HttpProbe("https://n1/", (204,), period_s=2.0, timeout_s=0.5),
                TcpProbe("n1:29500"),
                GrpcProbe("n1:9000", "a.B"),
                ExporterProbe("http://n1:9400/metrics", preset="dcgm"),
                ExporterProbe("http://n1:9400/metrics", 'x{a="b"} > 1'),
            ),
        ),
    )


@pytest.mark.parametrize(("key", "names"), [("engine", ENGINES), ("canary", CANARIES)])
def test_every_engine_and_canary_can_be_named(tmp_path: Path, key: str, names: Collection[str]) -> None:
    for name in names:
        (unit,) = read(
            tmp_path, f"cells: [{{name: a, units: [{{name: u, url: 'http://x', {key}: {name}}}]}}]"
        ).fleet.units
        assert getattr(unit, key) == name


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_named(tmp_path: Path, preset: str) -> None:
    assert probes_of(tmp_path, f"probe: exporter, url: 'http://x/m', preset: {preset}") == (
        ExporterProbe("http://x/m", preset=preset),
    )


def test_ratios_and_times_of_rules_are_checked_by_their_names(tmp_path: Path) -> None:
    rules = read(tmp_path, CELLS + "rules: {degraded_ratio: 2, slow_start_s: 0, panic_max_s: 0}").rules
    assert rules == Rules(degraded_ratio=2.0, slow_start_s=0.0, panic_max_s=0.0)


def test_the_example_is_good() -> None:
    settings = load(str(ROOT / "deploy" / "cellgate.example.yaml"), Overrides())
    assert [unit.name for unit in settings.fleet.units] == ["a1", "a2", "b1"]


# What is wrong with a bad one. In what is expected below, "…" stands for any words.


def same(line: str, expected: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), line) is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("polcy: x", "polcy: unknown key; did you mean 'policy'?"),
        ("connect_s: 3", "connect_s: unknown key; did you mean 'timeouts.connect_s'?"),
        ("rules: {xyz: 3}", "rules.xyz: unknown key; known here: weak_window_s, …"),
        ("1: x", "1: expected a string as the key, found 1; put it in quotes"),
        ('"a\\nb": x', "'a\\nb': unknown key; known here: listen, …"),
        ("policy: least_laod", "policy: expected a policy: least_load, …; did you mean 'least_load'?"),
        ("access_log: on", "access_log: expected a format: console, json, off, found true"),
        ("listen: 8000", "listen: expected HOST:PORT, …, found 8000; did you mean '127.0.0.1:8000'?"),
        ("listen: '::1:8000'", "listen: expected HOST:PORT, with an IPv6 host in brackets, found '::1:8000'"),
        ("admin: a:65536", "admin: expected HOST:PORT, with an IPv6 host in brackets, found 'a:65536'"),
        ("pass_unlisted: 1", "pass_unlisted: expected true or false, found 1"),
        ("rules:", "rules: expected a mapping, found nothing"),
        ("limits: 3", "limits: expected a mapping, found 3"),
        ("timeouts: {connect_s: 0}", "timeouts.connect_s: expected a number of seconds above 0, found 0"),
        ("timeouts: {connect_s: .nan}", "timeouts.connect_s: …, found nan"),
        ("timeouts: {connect_s: .inf}", "timeouts.connect_s: …, found inf"),
        ("timeouts: {connect_s: yes}", "timeouts.connect_s: …, found true"),
        ("timeouts: {drain_s: -1}", "timeouts.drain_s: expected a number of seconds, 0 or more, found -1"),
        ("rules: {attempts: 1.5}", "rules.attempts: expected a whole number from 1, found 1.5"),
        ("rules: {degraded_ratio: 1}", "rules.degraded_ratio: expected a ratio above 1, found 1"),
        ("rules: {weak_rate: 1.1}", "rules.weak_rate: expected a share from 0 to 1, found 1.1"),
        ("limits: {head_bytes: 64MB}", "limits.head_bytes: expected a size: …; did you mean '64MiB'?"),
        (
            "limits: {body_bytes: 2MiB, bodies_bytes: 1MiB}",
            "limits: body_bytes (2097152) must not be larger than bodies_bytes (1048576), …",
        ),
        ("limits: {head_bytes: 1, head_bytes: 2}", "limits.head_bytes: duplicate key, again in line 2"),
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
        ("admin_token: s3cret", "admin_token: unknown key; did you mean 'admin_token_file'?"),
        ("redis: 6379", "redis: expected a string, found 6379"),
        ("redis_prefix: '*'", "redis_prefix: expected a prefix of at most 64 letters, …, found '*'"),
        ("redis_username: 'a b'", "redis_username: expected a user name of …, found 'a b'"),
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


def probes_of(tmp_path: Path, *probes: str) -> tuple[object, ...]:
    """The probes of the one node of the one unit, each given as the inside of a YAML mapping."""
    node = f"{{name: n, role: leader, probes: [{', '.join(f'{{{probe}}}' for probe in probes)}]}}"
    unit = f"{{name: a, url: 'http://x', nodes: [{node}]}}"
    return read(tmp_path, f"cells: [{{name: a, units: [{unit}]}}]").fleet.units[0].nodes[0].probes


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
        (f"probe: http, {PAGE}, expect: 200", "[0].expect: …, found 200; did you mean [200]?"),
        (
            f"probe: http, {PAGE}, expect: [99]",
            "[0].expect: expected a list of HTTP statuses …, found a list",
        ),
        (
            f"probe: http, {PAGE}, timeout_s: 0",
            "[0].timeout_s: expected a number of seconds above 0, found 0",
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
        probes_of(tmp_path, one, f"{one}, period_s: 2")
    (line,) = caught.value.problems
    assert same(line, "….probes: duplicate probe 'http x/m'")


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


def test_a_key_left_out_gets_one_line(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "cells: [{name: a, units: [{name: a}]}]")
    assert line == "gate.yaml: cells[0].units[0].url: required key is missing"


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


# The machine's memory.


@pytest.mark.parametrize(
    ("group", "files", "limits"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "400"}, [400]),
        ("0::/", {"memory.max": "300"}, [300]),
        ("1:cpu:/\n4:memory:/a", {"memory/memory.limit_in_bytes": "200"}, [200]),
        ("1:cpu:/", {}, []),
    ],
)
def test_the_limits_of_control_groups_count(
    tmp_path: Path, group: str, files: dict[str, str], limits: list[int]
) -> None:
    for name, text in {
        "proc/self/cgroup": group,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert list(cgroup_limits(tmp_path)) == limits


# The documentation.

IN_WORDS = {
    "advertise": "where it listens",
    "cells[].discover.host": "required with `dns`",
    "cells[].discover.server": "the system's",
    "cells[].discover.path": "required with `file`",
    "cells[].discover.name": "required with `lws`",
    "cells[].discover.namespace": "the gate's own, else `default`",
    "cells[].discover.kubeconfig": "the account of the gate's pod, else the user's file",
    "cells[].discover.cluster": "required with `ecs`",
    "cells[].discover.services": "all",
    "cells[].discover.region": "as boto3 finds it",
    "cells[].discover.port": "required with `lws`, `ecs`, `A` and `AAAA`",
    "cells[].discover.agent_port": "no agents",
    "cells[].discover.period_s": "5, with `file` 1",
    "cells[].discover.unit.engine": "detected",
    "cells[].discover.unit.canary": "detected",
    "cells[].units[].engine": "detected",
    "cells[].units[].canary": "detected",
    "cells[].units[].metrics_url": "the engine's usual place",
    "cells[].units[].nodes[].agent": "none",
    "cells[].units[].nodes[].probes": "none",
    "cells[].units[].nodes[].probes[].url": "required with `http` and `exporter`",
    "cells[].units[].nodes[].probes[].address": "required with `tcp` and `grpc`",
    "cells[].units[].nodes[].probes[].expect": "200 to 299",
    "cells[].units[].nodes[].probes[].service": "the server as a whole",
    "cells[].units[].nodes[].probes[].period_s": "1, with `exporter` 5",
    "cells[].units[].nodes[].probes[].timeout_s": "3",
    "cells[].units[].models": "asked of the unit",
    "cells[].units[].nodes": "one leader with the unit's name",
    "limits.bodies_bytes": "a quarter of memory",
}
SECTIONS = {level.removesuffix("[]") for level in SCHEMA if "." not in level and level}


def said(key: str, default: object) -> str:
    """A default as the documentation has it."""
    if key in IN_WORDS:
        return IN_WORDS[key]
    match default:
        case _ if default is PydanticUndefined:
            return "required"
        case None | "" | ():
            return "`none`"
        case bool():
            return f"`{str(default).lower()}`"
        case int() if key.endswith("_bytes"):
            return f"`{default // MIB}MiB`" if default % MIB == 0 else f"`{default // KIB}KiB`"
        case float():
            return f"`{default:g}`"
    return f"`{default}`"


def test_every_key_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = dict(re.findall(r"^### `(.+?)`\n(?:(?!#).*\n)*?Default: (.+)$", text, re.MULTILINE))
    keys = {
        f"{level}.{key}".removeprefix("."): field.default
        for level, mapping in SCHEMA.items()
        for key, field in mapping.model_fields.items()
    }
    assert documented == {key: said(key, default) for key, default in keys.items() if key not in SECTIONS}
    assert set(re.findall(r"^## `(.+?)`$", text, re.MULTILINE)) == SECTIONS
