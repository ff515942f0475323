"""What a good configuration file means."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from cellgate.policies import POLICIES
from cellgate.probes.engines import CANARIES, ENGINES
from cellgate.probes.exporter import PRESETS, ExporterProbe
from cellgate.probes.grpc_health import GrpcProbe
from cellgate.probes.nodes import HttpProbe, TcpProbe
from cellgate.proxy.cli.terminal import fleet_table
from cellgate.proxy.config.checks import quarter_of_memory
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.settings import MIB, Address, RedisAccess
from cellgate.router.judge import KnownAnswerRules
from cellgate.router.nouns import Cell, Fleet, Node, Role, Rules, Unit
from tests.unit.config.files import CELLS, FULL, GIVEN, ROOT, probes_of, read


def test_a_full_file_is_read_as_it_says(tmp_path: Path) -> None:
    settings = read(tmp_path, FULL)
    nodes = (Node("a1-0", Role.LEADER), Node("a1-1", Role.FOLLOWER))
    assert settings.fleet == Fleet(
        cells=(Cell("a", 2.0), Cell("b")),
        units=(Unit("a1", "a", "http://node-1:8000", ("llama",), 0.5, 64, nodes),),
    )
    assert (settings.listen, settings.admin) == (Address("0.0.0.0", 80), Address("::1", 9000))
    assert (settings.policy, settings.access_log, settings.pass_unlisted) == ("p2c", "console", True)
    assert settings.rules == Rules(canary_idle_s=3.0, attempts=4)
    assert (settings.limits.body_bytes, settings.limits.bodies_bytes) == (MIB, 2_000_000)
    assert (settings.timeouts.connect_s, settings.timeouts.drain_delay_s) == (0.5, 0.0)


def test_a_file_of_units_only_gets_the_defaults(tmp_path: Path) -> None:
    settings = read(tmp_path, CELLS)
    assert settings.fleet.units[0].nodes == (Node("a1", Role.LEADER),)
    assert (settings.listen, settings.admin, settings.policy) == (GIVEN.listen, GIVEN.admin, GIVEN.policy)
    assert (settings.rules, settings.timeouts, settings.tls) == (GIVEN.rules, GIVEN.timeouts, GIVEN.tls)
    assert settings.limits.bodies_bytes == quarter_of_memory()


def test_known_answers_and_continuation_across_builds_are_read(tmp_path: Path) -> None:
    more = "known_answer: {every_s: 0}\ncontinue_across_builds: true"
    settings = read(tmp_path, f"{CELLS}{more}")
    assert settings.known_answer == KnownAnswerRules(every_s=0.0)
    assert settings.continue_across_builds


def test_the_access_log_is_for_people_on_a_terminal_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert read(tmp_path, CELLS, on_terminal=True).access_log == "console"
    assert read(tmp_path, CELLS + "access_log: json", on_terminal=True).access_log == "json"


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
    rest = f"redis_password_file: {tmp_path}/secret\nredis_prefix: 'east:'"
    assert read(tmp_path, CELLS + rest).redis is None
    text = CELLS + "redis: redis://file:1\n" + rest
    assert read(tmp_path, text).redis == RedisAccess("redis://file:1", None, "from-file", "east:")
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
              - {probe: http, url: https://n1/}
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
                HttpProbe("https://n1/"),
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
    rules = read(tmp_path, CELLS + "rules: {slow_start_s: 0}").rules
    assert rules == Rules(slow_start_s=0.0)


def test_the_example_is_good() -> None:
    settings = load(str(ROOT / "deploy" / "cellgate.example.yaml"), Overrides())
    assert [unit.name for unit in settings.fleet.units] == ["a1", "a2", "b1"]
