"""What a good configuration file means."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

import pytest

from cellgate.policies import POLICIES
from cellgate.probes.engines import CANARIES, ENGINES
from cellgate.probes.nodes import HttpProbe, TcpProbe
from cellgate.proxy.cli.terminal import fleet_table
from cellgate.proxy.config.checks import cgroup_limits, quarter_of_memory
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides, read_settings
from cellgate.proxy.config.settings import (
    MIB,
    Address,
    Peers,
    RedisAccess,
    Settings,
    is_token,
    payer_at,
    secret_of,
)
from cellgate.proxy.config.sources import DnsSource, EcsSource, FileSource, LwsSource
from cellgate.proxy.config.yaml_file import VariableError, replaced
from cellgate.router.known_answers import KnownAnswerRules
from cellgate.router.nouns import Cell, Fleet, Node, Role, Rules, Unit
from tests.extras import needs
from tests.unit.config.files import CELLS, FULL, GIVEN, probes_of, problems, read, same


def test_a_full_file_is_read_as_it_says(tmp_path: Path) -> None:
    settings = read(tmp_path, FULL)
    nodes = (Node("a1-0", Role.LEADER, "[::1]:9902"), Node("a1-1", Role.FOLLOWER))
    engine = ("triton", "generate", "http://x:2/metrics?a=b")
    unit = Unit("a1", "a", "http://node-1:8000", ("llama",), 0.5, 64, nodes, *engine)
    assert settings.fleet == Fleet(cells=(Cell("a", 2.0), Cell("b")), units=(unit,))
    assert (settings.listen, settings.admin) == (Address("0.0.0.0", 80), Address("::1", 9000))
    assert (settings.policy, settings.access_log, settings.pass_unlisted) == ("p2c", "console", True)
    assert settings.rules == Rules(canary_idle_s=3.0, attempts=4)
    assert (settings.limits.body_bytes, settings.limits.bodies_bytes) == (MIB, 2_000_000)
    assert (settings.timeouts.connect_s, settings.timeouts.drain_delay_s) == (0.5, 0.0)
    assert (settings.known_answer, settings.continue_across_builds) == (KnownAnswerRules(0.0), True)


def test_a_file_of_units_only_gets_the_defaults(tmp_path: Path) -> None:
    settings = read(tmp_path, CELLS)
    assert settings.fleet.units[0].nodes == (Node("a1", Role.LEADER),)
    assert (settings.listen, settings.admin, settings.policy) == (GIVEN.listen, GIVEN.admin, GIVEN.policy)
    assert (settings.rules, settings.timeouts, settings.tls) == (GIVEN.rules, GIVEN.timeouts, GIVEN.tls)
    assert settings.limits.bodies_bytes == quarter_of_memory()


def test_the_access_log_is_for_people_on_a_terminal_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert read(tmp_path, CELLS, on_terminal=True).access_log == "console"
    for name in ("json", "off"):
        assert read(tmp_path, f"{CELLS}access_log: {name}", on_terminal=True).access_log == name


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


def test_tokens_come_from_the_environment_before_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    text = CELLS + f"admin_token_file: {tmp_path}/token"
    settings = read(tmp_path, text, {})
    assert (settings.admin_token, settings.agent_token) == ("from-file", None)
    environ = {"CELLGATE_ADMIN_TOKEN": "from-env", "CELLGATE_AGENT_TOKEN": "s3cret"}
    settings = read(tmp_path, text, environ)
    assert (settings.admin_token, settings.agent_token) == ("from-env", "s3cret")
    assert not any(secret in repr(settings) for secret in environ.values())


def test_a_gate_that_has_the_hash_of_the_token_has_the_fleets_secret_and_no_token(tmp_path: Path) -> None:
    hashed = f"sha256:{sha256(b's3cret').hexdigest()}"
    known, plain = (
        read(tmp_path, CELLS, {"CELLGATE_ADMIN_TOKEN": token}).admin_token or ""
        for token in (hashed, "s3cret")
    )
    assert [is_token(b"s3cret", token) for token in (known, plain)] == [True, True]
    assert [is_token(hashed.encode(), token) for token in (known, plain)] == [False, False]
    assert not is_token(hashed.removeprefix("sha256:").encode(), known)
    secrets = {secret_of(Settings(Fleet(), admin_token=token)) for token in (known, plain)}
    assert len(secrets) == 1
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read(tmp_path, CELLS, {"CELLGATE_ADMIN_TOKEN": "sha256:s3cret"})


@needs("redis")
def test_a_gate_comes_to_redis_as_the_environment_says_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    rest = f"redis_password_file: {tmp_path}/secret\nredis_prefix: 'east:'"
    assert read(tmp_path, CELLS + rest).redis is None
    text = CELLS + "redis: redis://file:1\n" + rest
    assert read(tmp_path, text).redis == RedisAccess("redis://file:1", None, "from-file", "east:")
    assert read(tmp_path, CELLS, redis="redis://flag:1").redis == RedisAccess("redis://flag:1")
    environ = {"CELLGATE_REDIS_USERNAME": "you", "CELLGATE_REDIS_PASSWORD": "from-env"}
    settings = read(tmp_path, text, environ, redis="redis://user:in-url@flag:1")
    assert settings.redis == RedisAccess("redis://user:in-url@flag:1", "you", "from-env", "east:")
    assert not any(secret in repr(settings) for secret in ("from-env", "in-url"))


def test_a_units_key_comes_from_its_file_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    one = f"{{name: a1, url: 'http://x:1', api_key_file: {tmp_path}/key}}"
    text = f"cells: [{{name: a, units: [{one}, {{name: a2, url: 'http://x:2'}}]}}]"
    settings = read(tmp_path, text, {"CELLGATE_UNIT_API_KEY": "from-env"})
    assert [unit.api_key for unit in settings.fleet.units] == ["from-file", "from-env"]
    assert "from-" not in repr(settings) + fleet_table(settings.fleet)


def test_how_a_node_is_probed_is_read_as_it_says(tmp_path: Path) -> None:
    probes = {
        "probe: http, url: https://n1/": HttpProbe("https://n1/"),
        "probe: tcp, address: n1:29500": TcpProbe("n1:29500"),
    }
    assert probes_of(tmp_path, *probes) == tuple(probes.values())


@pytest.mark.parametrize(("key", "names"), [("engine", ENGINES), ("canary", CANARIES), ("", POLICIES)])
def test_each_engine_canary_and_policy_can_be_named(tmp_path: Path, key: str, names: Collection[str]) -> None:
    for name in names:
        more = f", {key}: {name}" if key else ""
        text = f"cells: [{{name: a, units: [{{name: u, url: 'http://x'{more}}}]}}]"
        settings = read(tmp_path, text, policy=None if key else name)
        assert getattr(settings.fleet.units[0], key) == name if key else settings.policy == name


# `discover` of a cell: what it makes, and what is said of one that is wrong.


def like(**keys: object) -> Unit:
    return Unit("", "c", "", **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("discover", "source"),
    [
        ("{from: dns, host: units.svc, port: 8000}", DnsSource(like(), "units.svc", port=8000)),
        (
            "{from: dns, host: units.svc, record: SRV, scheme: https, server: '10.0.0.1:53'}",
            DnsSource(like(), "units.svc", "SRV", 0, "https", "10.0.0.1:53"),
        ),
        ("{from: file, path: units.yaml}", FileSource(like(api_key="s3cret"), "units.yaml")),
        pytest.param(
            "{from: lws, name: big, port: 8000, agent_port: 9902, unit: {engine: vllm, max_in_flight: 9}}",
            LwsSource(like(engine="vllm", max_in_flight=9), "big", 8000, agent_port=9902),
            marks=needs("clusters"),
        ),
        pytest.param(
            "{from: ecs, cluster: prod, services: [a, b], port: 8000, region: eu-west-1}",
            EcsSource(like(), "prod", 8000, ("a", "b"), "eu-west-1"),
            marks=needs("clusters"),
        ),
    ],
)
def test_a_cell_may_be_discovered(tmp_path: Path, discover: str, source: object) -> None:
    environ = {"CELLGATE_UNIT_API_KEY": "s3cret"} if "file" in discover else {}
    settings = read(tmp_path, f"cells:\n- name: c\n  weight: 2\n  discover: {discover}\n", environ)
    assert settings.sources == (source,)
    assert "s3cret" not in repr(settings)
    assert (settings.fleet.units, [cell.name for cell in settings.fleet.cells]) == ((), ["c"])


# `${NAME}` in a configuration: what it becomes, where it is left, and one line for what is not set.

ENVIRON = {"HOST": "10.0.0.7", "WEIGHT": "2.5", "EMPTY": "", "NO": "no", "TRICK": "a, b: [c]\nadmin: x"}


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("${HOST}", "10.0.0.7"),
        ("http://${HOST}:${PORT:-8000}", "http://10.0.0.7:8000"),
        ("${EMPTY}", ""),
        ("${EMPTY:-x}", "x"),
        ("${UNSET:-}", ""),
        ("${UNSET:-a:-b}", "a:-b"),
        ("$${HOST} $HOST $", "${HOST} $HOST $"),
    ],
)
def test_a_reference_is_replaced(text: str, becomes: str) -> None:
    assert replaced(text, ENVIRON) == becomes


@pytest.mark.parametrize("text", ["${", "${}", "${1}", "${HOST", "${HO ST}", "${HOST:x}"])
def test_what_is_no_reference_is_said(text: str) -> None:
    with pytest.raises(VariableError, match=r"expected \$\{NAME\} or \$\{NAME:-DEFAULT\}, found "):
        replaced(text, ENVIRON)


@needs("redis")
def test_values_of_a_file_come_from_the_environment(tmp_path: Path) -> None:
    text = """
listen: ${HOST}:${PORT:-80}
redis: ${TRICK}
cells:
  - name: "${NO}"
    weight: ${WEIGHT}
    units:
      - {name: a1, url: "http://${HOST}:8000", max_in_flight: 3}
"""
    settings = read(tmp_path, text, ENVIRON)
    assert settings.redis is not None
    assert str(settings.admin) == "127.0.0.1:9901", "a variable cannot add a key"
    assert str(settings.listen) == "10.0.0.7:80"
    [cell] = settings.fleet.cells
    assert (cell.name, cell.weight) == ("no", 2.5)
    assert settings.fleet.units[0].url == "http://10.0.0.7:8000"


def test_each_variable_that_is_not_set_is_one_line_with_its_place(tmp_path: Path) -> None:
    text = "listen: ${LISTEN}\nworkers: &n ${N}\nadvertise: *n\nredis: 'x${'\n"
    assert problems(tmp_path, text, ENVIRON) == [
        "gate.yaml:1:9: the variable LISTEN is not set; set it, or write ${LISTEN:-DEFAULT}",
        "gate.yaml:2:10: the variable N is not set; set it, or write ${N:-DEFAULT}",
        "gate.yaml:4:8: expected ${NAME} or ${NAME:-DEFAULT}, found 'x${'; write $${ for ${ itself",
    ]
    (line,) = problems(tmp_path, "cells: [{name: ${NO}, units: []}]\n", ENVIRON)
    assert same(line, "gate.yaml:1:…: expected YAML, …; put ${…} in quotes…"), "within braces it needs them"


# The configuration read in a process of its own: the same settings and problems, no word when it is late.

FLAGS = Overrides(units=("http://127.0.0.1:8001", "b=http://127.0.0.1:8002"))


def test_it_finds_the_same_settings_and_all_problems(tmp_path: Path) -> None:
    assert read_settings(None, FLAGS) == load(None, FLAGS)
    file = tmp_path / "cellgate.yaml"
    file.write_text("lissten: 127.0.0.1:1\nworkers: 0\n")
    told = []
    for found_by in (read_settings, load):
        with pytest.raises(ConfigError) as refused:
            found_by(str(file), Overrides())
        told.append(refused.value.problems)
    assert told[0] == told[1]
    assert len(told[0]) > 1


@pytest.mark.parametrize(
    "asked", [b"", pickle.dumps((None, FLAGS))], ids=["before it asked", "while it waited"]
)
def test_a_gate_that_ends_meanwhile_leaves_no_traceback(asked: bytes) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cellgate.proxy.config.load"]
    done = subprocess.run(command, input=asked, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


# Who is trusted by address.


NAMED = Peers(["10.0.0.0/8", "2001:db8::/32", "fe80::/10", "192.0.2.7"])


@pytest.mark.parametrize(
    ("peers", "trusted", "others"),
    [
        (Peers(), "127.0.0.1 127.1.2.3 ::1 ::ffff:127.0.0.1", "10.0.0.1 here 127.0.0.1:80 fe80::1%eth0"),
        (NAMED, "10.1.2.3 ::ffff:10.1.2.3 2001:db8::7 fe80::1%eth0 192.0.2.7", "11.0.0.1 192.0.2.8"),
    ],
)
def test_this_machine_is_trusted_and_who_is_named(peers: Peers, trusted: str, others: str) -> None:
    assert all(map(peers.trusts, trusted.split()))
    assert not any(map(peers.trusts, ["", "::ffff:11.0.0.1", *others.split()]))


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "payer"),
    [
        ("192.0.2.8", "198.51.100.1", "192.0.2.8"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1, 192.0.2.8 ,10.0.0.2", "192.0.2.8"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "198.51.100.1, unknown, 10.0.0.2", "10.0.0.2"),
        ("2001:db8::1", "2001:db9:0:7:1:2:3:4", "2001:db9:0:7::/64"),
        ("::ffff:10.0.0.1", "::ffff:192.0.2.8", "192.0.2.8"),
        ("", "192.0.2.8", ""),
    ],
)
def test_who_pays_is_the_last_address_that_is_not_trusted(peer: str, forwarded_for: str, payer: str) -> None:
    assert payer_at(peer, forwarded_for, NAMED) == payer


@pytest.mark.parametrize("network", ["10.0.0.1/8", "ten", "", "10.0.0.0/33"])
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ValueError, match=r"does not appear|has host bits"):
        Peers([network])


# The memory that control groups leave to the gate.


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
