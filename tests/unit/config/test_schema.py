"""Each key of the configuration has an effect, is documented with its default, and is in the schema."""

from __future__ import annotations

import copy
import json
import re
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cellgate.extras import EXTRAS, part_of
from cellgate.proxy.cli.main import main
from cellgate.proxy.config import yaml_file
from cellgate.proxy.config.limits import LIMITS, REACHED, HardLimits, reached
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.schema import INGREDIENTS, SCHEMA, FileKeys, json_schema
from cellgate.proxy.config.settings import KIB, MIB, Settings
from tests.extras import needs
from tests.unit.config.files import CELLS, FULL, ROOT, problems, read
from tests.unit.observe.test_metrics import A1, make, scrape

OPERATOR_SCHEMA = part_of("operator", "keys").OPERATOR_SCHEMA if "operator" in EXTRAS else {}
ALL_KEYS = [
    needs("clusters"),
    needs("guardrail"),
    needs("kv_events"),
    needs("node_probes"),
    needs("operator"),
    needs("otlp"),
    needs("realtime"),
    needs("redis"),
    needs("web_tokens"),
    needs("workers"),
]
"""For documents that have every key."""

ONE_CELL: Any = [{"name": "c", "units": [{"name": "u", "url": "http://u:1"}]}]
DOCUMENTS: list[Any] = yaml.safe_load("""
- cells:
  - {name: c, weight: 2, spill_s: 1, transfer: nixl, units: [{
      <<: &like {weight: 2, max_in_flight: 3, models: [m], engine: vllm, canary: completions, role: decode,
        bootstrap_port: 9, api_key_file: SECRET},
      name: u, url: "http://u:1", metrics_url: "http://u:9/m",
      kv_events: {from: vllm, endpoint: "tcp://u:2", replay_endpoint: "tcp://u:3", ranks: 2},
      nodes: [&node {name: node-0, role: leader, agent: "n:4", place: [rack], probes: [
        {probe: http, url: "http://n:5/"}, {probe: tcp, address: "n:6"},
        {probe: grpc, address: "n:7", service: s},
        {probe: exporter, url: "http://n:8/", rule: node_load1 > 9}]}]},
      {name: v, url: "http://v:1"}]}
  listen: 1.2.3.4:5
  admin: 1.2.3.4:6
  agent_check: 1.2.3.4:7
  workers: 3
  trusted: [10.0.0.0/8]
  redis: redis://r
  redis_password_file: SECRET
  redis_prefix: "p:"
  advertise: http://me:1
  admin_token_file: SECRET
  agent_token_file: SECRET
  fleet_secret_file: SECRET
  policy: p2c
  access_log: "off"
  usage_log: LOG
  operator: OPERATOR
  keys:
    file: KEYS
    on_revoke: end
    jwt: {issuer: issuing, audience: heard, jwks_url: "http://jwks:1/k", tenant_claim: t}
  tracing: {endpoint: "http://spans:1/v1/traces", sample_ratio: 0.5}
  otlp_metrics: http://told:1/v1/metrics
  rules: {canary_idle_s: 15, canary_timeout_s: 2, warm_up_timeout_s: 61, slow_start_s: 11, attempts: 4}
  limits: {body_bytes: 6000, bodies_bytes: 7000, idle_timeout_s: 76}
  timeouts: {connect_s: 4, answer_s: 601, drain_delay_s: 6, drain_s: 301}
  tls: {cert: FILE, key: FILE, ca: FILE, unit_cert: FILE, unit_key: FILE, admin_cert: FILE, admin_key: FILE,
    admin_client_ca: FILE}
  queue: {limit: 7, max_wait_s: 9}
  session_headers: [X-A, x-b]
  poison: {ban_s: 5}
  known_answer: {every_s: 7}
  guardrail: {url: "http://guard:1/g", request: false, answer: whole, timeout_s: 3, fail: open}
  cors: {origins: ["https://a.example"]}
  realtime: true
  internal_headers: all
  pass_unlisted: true
  models: {alias: m}
  fallback: {m: k}
  no_continuation: [m]
  continue_across_builds: true
- cells: [{name: c, units: [{name: u, url: "http://u:1", nodes: [{<<: *node, probes: [
    {probe: exporter, url: "http://n:8/metrics", preset: dcgm}]}]}]}]
- {cells: [{name: c, units: []}], redis: redis://r, discovery: redis}
- cells: [{name: c, discover: {from: dns, host: named, port: 1, scheme: https, server: "ns:53", unit: *like}}]
- cells: [{name: c, discover: {from: dns, host: named, record: SRV, unit: *like}}]
- cells: [{name: c, discover: {from: file, path: /units}}]
- cells: [{name: c, discover: {from: pods, selector: "app=vllm", port: 1}}]
- cells: [{name: c, discover: {from: pods, pool: llm}}]
- cells: [{name: c, discover: {from: lws, name: set, namespace: n, kubeconfig: FILE, places: true, port: 1,
    agent_port: 2, scheme: https, unit: *like}}]
- cells: [{name: c, discover: {from: ecs, cluster: clustered, services: [s], region: moon, port: 1,
    agent_port: 2, unit: *like}}]
""")
OPERATORS: list[Any] = yaml.safe_load("""
- alb: {rule: "arn:x:listener/app/y", target_group: "arn:x:targetgroup/y", weight: 5, region: moon}
- leases: {namespace: n, kubeconfig: FILE}
- recovery: [{<<: &remedy {cell: c, audit: LOG, dry_run: true, after_s: 71, timeout_s: 72, backoff_s: 73,
    max_parallel: 5, max_share: 0.11, attempts: 7}, command: ["true"]}]
- recovery: [{<<: *remedy, webhook: "https://hooked:1/h", secret_file: SECRET}]
- recovery: [{<<: *remedy, kubernetes: {namespace: space, selector: "unit={unit}", evict: false,
    kubeconfig: FILE}}]
- recovery: [{<<: *remedy, ecs: &tasks {cluster: clustered, services: [served], region: moon}}]
- recovery: [{<<: *remedy, systemd: "vllm@{unit}"}]
- roll: {audit: LOG, command: ["true"], undo: ["false"], timeout_s: 71, parallel: 2, max_unavailable: 3,
    drain_s: 72, start_s: 73, soak_s: 74, max_errors: 0.11, max_degraded: 0.12}
- roll: {audit: LOG, kubernetes: {namespace: n, image: new, undo_image: old, container: box,
    kubeconfig: FILE}}
- roll: {audit: LOG, ecs: *tasks}
""")


@pytest.fixture
def fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Any]:
    """Fills a document: a file of its own for each key that names one, on a machine that has all."""
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda *_, **__: None)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    # Most of the time of this test would be that of the YAML parser.
    monkeypatch.setattr(
        yaml_file, "read", lambda path, _: yaml_file.YamlFile(json.loads(Path(path).read_text()), [])
    )
    names = iter(range(1000))

    def filled(value: object) -> object:
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        if value not in ("FILE", "SECRET", "LOG", "KEYS", "OPERATOR"):
            return value
        path = tmp_path / f"{value.lower()}-{next(names)}"
        text = {"KEYS": "", "OPERATOR": json.dumps({"roll": {"command": ["true"], "audit": str(path)}})}
        path.write_text(text.get(value, str(path)))
        return str(path)

    return filled


def keys_in(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Any]]:
    """The place of each mapping, a key of it, and the mapping."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield place, key, value
            inner = f"{place}.{key}".lstrip(".")
            if inner in schema or f"{inner}[]" in schema:
                yield from keys_in(each, schema, inner)
    elif isinstance(value, list):
        for each in value:
            yield from keys_in(each, schema, f"{place}[]")


def settings_of(tmp_path: Path, document: Any) -> Settings:
    # What a file is called would be found even where the secret in it is not.
    return replace(read(tmp_path, json.dumps(document)), secret_files=())


def operated(tmp_path: Path, document: Any) -> Settings:
    """With this file of the operator."""
    (tmp_path / "operator").write_text(json.dumps(document))
    return settings_of(tmp_path, {"cells": ONE_CELL, "operator": str(tmp_path / "operator")})


@pytest.mark.parametrize(
    ("documents", "schema", "settings"),
    [
        pytest.param(DOCUMENTS, SCHEMA, settings_of, marks=ALL_KEYS),
        pytest.param(OPERATORS, OPERATOR_SCHEMA, operated, marks=needs("operator")),
    ],
    ids=["the gate's file", "the operator's file"],
)
def test_every_key_set_to_what_is_not_its_default_is_found_in_settings(
    tmp_path: Path,
    fill: Callable[[object], Any],
    documents: list[Any],
    schema: Mapping[str, Any],
    settings: Callable[[Path, Any], Settings],
) -> None:
    ignored = []
    for document in map(fill, documents):
        whole = settings(tmp_path, document)
        text = f"{whole!r}{asdict(whole)!r}".lower()
        for number, (place, key, found) in enumerate(keys_in(document, schema)):
            fewer = copy.deepcopy(document)
            _, _, mapping = list(keys_in(fewer, schema))[number]
            del mapping[key]
            try:
                effect = settings(tmp_path, fewer) != whole
            except ConfigError:  # It cannot be left out.
                effect = isinstance(found[key], dict | list) or str(found[key]).lower() in text
            if not effect:
                ignored.append(f"{place}.{key}")
    assert ignored == []


@pytest.mark.parametrize(
    ("documents", "schema"),
    [
        pytest.param(DOCUMENTS, SCHEMA, marks=ALL_KEYS),
        pytest.param(OPERATORS, OPERATOR_SCHEMA, marks=needs("operator")),
    ],
)
def test_no_key_is_missing_among_these(documents: list[Any], schema: Mapping[str, Any]) -> None:
    said = {(place, key) for document in documents for place, key, _ in keys_in(document, schema)}
    known = {(place, key) for place, mapping in schema.items() for key in mapping.model_fields}
    assert known == said


def test_every_setting_is_a_key_of_its_name_or_is_made_of_others() -> None:
    made = {"fleet", "sources", "headers", "admin_token", "agent_token", "fleet_secret", "secret_files"}
    operated = {"remedies", "roll", "alb", "leases"}
    settings = {each.name for each in fields(Settings)} - made - operated
    assert settings == set(FileKeys.model_fields) - set(INGREDIENTS)


# Every key of the configuration is documented with its default.

IN_WORDS = {
    "access_log": "`json`, on a terminal `console`",
    "advertise": "where it listens",
    "host": "required with `dns`",
    "server": "the system's",
    "path": "required with `file`",
    "cells[].discover.name": "required with `lws`",
    "namespace": "the gate's own, else `default`",
    "kubeconfig": "the account of the gate's pod, else the user's file",
    "cells[].discover.cluster": "required with `ecs`",
    "services": "all",
    "region": "as boto3 finds it",
    "cells[].discover.port": "required with `lws`, `ecs`, `A` and `AAAA`, and with the `selector` of `pods`",
    "cells[].discover.selector": "`none`",
    "agent_port": "no agents",
    "selector": "the group of a LeaderWorkerSet",
    "container": "the engine's",
    "engine": "detected",
    "canary": "detected",
    "metrics_url": "the engine's usual place",
    "kv_events": "the unit is asked, if the packages are installed",
    "cells[].units[].kv_events.endpoint": "what the engine tells",
    "agent": "none",
    "probes": "none",
    "cells[].units[].nodes[].probes[].url": "required with `http` and `exporter`",
    "address": "required with `tcp` and `grpc`",
    "service": "the server as a whole",
    "cells[].units[].models": "asked of the unit",
    "nodes": "one leader with the unit's name",
    "bodies_bytes": "a quarter of memory",
    "models": "`none`",
    "fallback": "`none`",
}
"""By the whole key, or by its last part."""


def said(key: str, default: object) -> str:
    """A default as the documentation has it."""
    if words := IN_WORDS.get(key) or IN_WORDS.get(key.rpartition(".")[2]):
        return words
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
        case tuple():
            return f"`[{', '.join(default)}]`"
    return f"`{default}`"


SAID_THERE = {"cells[].discover.unit": "cells[].units[]"}
"""Mappings whose keys are all those of another one as well: they are the same settings."""


@pytest.mark.parametrize(
    ("page", "schema"),
    [("configuration.md", SCHEMA), pytest.param("operator.md", OPERATOR_SCHEMA, marks=needs("operator"))],
)
def test_every_key_is_documented_with_its_default(page: str, schema: dict[str, Any]) -> None:
    text = (ROOT / "docs" / page).read_text()
    sections = {level.removesuffix("[]") for level in schema if "." not in level and level}
    documented = dict(re.findall(r"^### `(.+?)`\n(?:(?!#).*\n)*?Default: (.+)$", text, re.MULTILINE))
    keys = {
        f"{level}.{key}".removeprefix("."): field.default
        for level, mapping in schema.items()
        for key, field in mapping.model_fields.items()
        if level not in SAID_THERE
    }
    assert documented == {key: said(key, default) for key, default in keys.items() if key not in sections}
    assert set(re.findall(r"^## `(.+?)`$", text, re.MULTILINE)) == sections


def test_what_is_said_elsewhere_is_the_same_there() -> None:
    for place, other in SAID_THERE.items():
        here, there = SCHEMA[place].model_fields, SCHEMA[other].model_fields
        assert {key: repr(field) for key, field in here.items()} == {key: repr(there[key]) for key in here}


# The JSON Schema and the models agree: on every key, on the files that are shipped, on what is wrong.

CHECKER = Draft202012Validator(json_schema())
FILES = sorted((ROOT / "deploy").rglob("cellgate*.yaml"))


def mappings(schema: dict[str, Any], place: str = "") -> dict[str, list[str]]:
    """The keys of each mapping of the schema, by its place."""
    found = {place: list(schema["properties"])}
    for key, inner in schema["properties"].items():
        here = f"{place}.{key}".lstrip(".")
        if inner.get("type") == "object":
            found |= mappings(inner, here)
        elif inner.get("type") == "array" and inner["items"].get("type") == "object":
            found |= mappings(inner["items"], f"{here}[]")
    return found


@pytest.mark.parametrize(
    ("flags", "models", "examples"),
    [
        ([], SCHEMA, FILES),
        pytest.param(
            ["--operator"], OPERATOR_SCHEMA, [ROOT / "deploy/recovery/operator.yaml"], marks=needs("operator")
        ),
    ],
)
def test_what_is_printed_is_a_schema_that_has_every_key_and_takes_what_is_shipped(
    flags: list[str],
    models: Mapping[str, type[BaseModel]],
    examples: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["schema", *flags]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    assert mappings(schema) == {place: list(keys.model_fields) for place, keys in models.items()}
    checker = Draft202012Validator(schema)
    for file in examples:
        found = checker.iter_errors(yaml.safe_load(file.read_text()))
        assert [error.message for error in found] == [], file


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        CELLS + "workers: ${WORKERS:-2}\naccess_log: off\nlimits: {body_bytes: '${BODY}'}",
        CELLS + "rules: {attempts: 3, slow_start_s: 0.5}\ntrusted: [10.0.0.0/8]",
    ],
)
def test_what_a_gate_takes_is_taken(text: str) -> None:
    assert [error.message for error in CHECKER.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    "text",
    [
        "polcy: random",
        "workers: 0",
        "access_log: on",
        "timeouts: {connect_s: 0}",
        "timeouts: {drain_s: soon}",
        "limits: {body_bytes: 64MB}",
        "trusted: 10.0.0.0/8",
        "tls: {certificate: x}",
        "listen: 8000",
    ],
)
def test_what_it_refuses_the_gate_refuses(tmp_path: Path, text: str) -> None:
    assert list(CHECKER.iter_errors(yaml.safe_load(CELLS + text)))
    assert problems(tmp_path, CELLS + text)


# The bounds in one place: each has a name in the metrics, and a row in the page that operators read.


def test_a_bound_that_took_effect_is_counted_by_its_name() -> None:
    metrics, _ = make(A1)
    before = scrape(metrics)
    for name in ("header_lines", "stop_bytes", "stop_bytes"):
        reached(name)
    metrics.limits["json_depth"] += 3
    shown = scrape(metrics)
    names = {name: f"cellgate_limits_total{{limit={name}}}" for name in ("header_lines", "json_depth")}
    assert [shown[sample] - before[sample] for sample in names.values()] == [1, 3]


def test_every_bound_is_positive_has_a_count_and_a_row_in_the_page_of_security_with_its_figure() -> None:
    bounds = {field.name: getattr(LIMITS, field.name) for field in fields(HardLimits)}
    assert list(REACHED) == list(bounds)
    assert all(bound > 0 for bound in bounds.values())
    section = (ROOT / "docs" / "security.md").read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+)", section, re.MULTILINE)
    assert {name: int(figure.replace(",", "")) for name, figure in rows} == bounds
    with pytest.raises(KeyError):
        reached("a_typo")
