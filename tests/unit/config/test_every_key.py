"""Every key of the configuration has an effect on Settings: none is accepted and ignored."""

from __future__ import annotations

import copy
import json
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy.config import yaml_file
from cellgate.proxy.config.actions import OPERATOR_SCHEMA
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.schema import INGREDIENTS, SCHEMA, FileKeys
from cellgate.proxy.config.settings import Settings
from tests.unit.config.files import read

UNIT = {"name": "u", "url": "http://u:1"}
CELLS: Any = [{"name": "c", "units": [UNIT]}]
PODS = {"namespace": "space", "selector": "unit={unit}", "evict": False, "kubeconfig": "FILE"}
TASKS = {"cluster": "clustered", "services": ["served"], "region": "moon"}
IMAGE = {"namespace": "n", "image": "new", "undo_image": "old", "container": "box", "kubeconfig": "FILE"}
LIKE = {
    "weight": 2,
    "max_in_flight": 3,
    "models": ["m"],
    "engine": "vllm",
    "canary": "completions",
    "role": "decode",
    "bootstrap_port": 9,
    "api_key_file": "SECRET",
}
EVENTS = {"from": "vllm", "endpoint": "tcp://u:2", "replay_endpoint": "tcp://u:3", "ranks": 2}
PROBES = [
    {"probe": "http", "url": "http://n:5/"},
    {"probe": "tcp", "address": "n:6"},
    {"probe": "grpc", "address": "n:7", "service": "s"},
    {"probe": "exporter", "url": "http://n:8/", "rule": "node_load1 > 9"},
]
NODE = {"name": "node-0", "role": "leader", "agent": "n:4", "place": ["rack"], "probes": PROBES}
PAGED = [{"probe": "exporter", "url": "http://n:8/metrics", "preset": "dcgm"}]
TIMES = {"after_s": 71, "timeout_s": 72, "backoff_s": 73, "max_parallel": 5, "max_share": 0.11, "attempts": 7}
UNIT_FULL: Any = {
    **LIKE,
    **UNIT,
    "metrics_url": "http://u:9/m",
    "kv_events": EVENTS,
    "nodes": [NODE],
}


def _found(**source: Any) -> Any:
    return {"cells": [{"name": "c", "discover": {**source, "unit": LIKE}}]}


def _remedied(**remedy: Any) -> Any:
    return {"recovery": [{"cell": "c", "audit": "LOG", "dry_run": True, **TIMES, **remedy}]}


def _rolled(**roll: Any) -> Any:
    return {"roll": {"audit": "LOG", **roll}}


DOCUMENTS: list[Any] = [
    {
        "cells": [
            {
                "name": "c",
                "weight": 2,
                "spill_s": 1,
                "transfer": "nixl",
                "units": [UNIT_FULL, {**UNIT, "name": "v", "url": "http://v:1"}],
            }
        ],
        "listen": "1.2.3.4:5",
        "admin": "1.2.3.4:6",
        "agent_check": "1.2.3.4:7",
        "workers": 3,
        "trusted": ["10.0.0.0/8"],
        "redis": "redis://r",
        "redis_password_file": "SECRET",
        "redis_prefix": "p:",
        "advertise": "http://me:1",
        "admin_token_file": "SECRET",
        "policy": "p2c",
        "access_log": "off",
        "usage_log": "LOG",
        "operator": "OPERATOR",
        "keys": {
            "file": "KEYS",
            "on_revoke": "end",
            "jwt": {
                "issuer": "issuing",
                "audience": "heard",
                "jwks_url": "http://jwks:1/k",
                "tenant_claim": "t",
            },
        },
        "tracing": {"endpoint": "http://spans:1/v1/traces", "sample_ratio": 0.5},
        "otlp_metrics": "http://told:1/v1/metrics",
        "rules": {
            "canary_idle_s": 15,
            "canary_timeout_s": 2,
            "warm_up_timeout_s": 61,
            "slow_start_s": 11,
            "attempts": 4,
        },
        "limits": {
            "body_bytes": 6000,
            "bodies_bytes": 7000,
            "idle_timeout_s": 76,
        },
        "timeouts": {
            "connect_s": 4,
            "answer_s": 601,
            "drain_delay_s": 6,
            "drain_s": 301,
        },
        "tls": {
            "cert": "FILE",
            "key": "FILE",
            "ca": "FILE",
            "unit_cert": "FILE",
            "unit_key": "FILE",
            "admin_cert": "FILE",
            "admin_key": "FILE",
            "admin_client_ca": "FILE",
        },
        "queue": {
            "limit": 7,
            "max_wait_s": 9,
        },
        "session_header": "x-a",
        "poison": {"ban_s": 5},
        "known_answer": {"every_s": 7},
        "guardrail": {
            "url": "http://guard:1/g",
            "request": False,
            "answer": "whole",
            "timeout_s": 3,
            "fail": "open",
        },
        "cors": {"origins": ["https://a.example"]},
        "realtime": True,
        "internal_headers": "all",
        "pass_unlisted": True,
        "models": {"alias": "m"},
        "fallback": {"m": "k"},
        "no_continuation": ["m"],
        "continue_across_builds": True,
    },
    {"cells": [{"name": "c", "units": [{**UNIT, "nodes": [{**NODE, "probes": PAGED}]}]}]},
    {"cells": [{"name": "c", "units": []}], "redis": "redis://r", "discovery": "redis"},
    _found(**{"from": "dns"}, host="named", port=1, scheme="https", server="ns:53"),
    _found(**{"from": "dns"}, host="named", record="SRV"),
    {"cells": [{"name": "c", "discover": {"from": "file", "path": "/units"}}]},
    _found(
        **{"from": "lws"},
        name="set",
        namespace="n",
        kubeconfig="FILE",
        places=True,
        port=1,
        agent_port=2,
        scheme="https",
    ),
    _found(
        **{"from": "ecs"},
        cluster="clustered",
        services=["s"],
        region="moon",
        port=1,
        agent_port=2,
    ),
]

OPERATORS: list[Any] = [
    {
        "alb": {
            "rule": "arn:x:listener/app/y",
            "target_group": "arn:x:targetgroup/y",
            "weight": 5,
            "region": "moon",
        },
    },
    {"leases": {"namespace": "n", "kubeconfig": "FILE"}},
    _remedied(command=["true"]),
    _remedied(webhook="https://hooked:1/h", secret_file="SECRET"),
    _remedied(kubernetes=PODS),
    _remedied(ecs=TASKS),
    _remedied(systemd="vllm@{unit}"),
    _rolled(
        command=["true"],
        undo=["false"],
        timeout_s=71,
        parallel=2,
        max_unavailable=3,
        drain_s=72,
        start_s=73,
        soak_s=74,
        max_errors=0.11,
        max_degraded=0.12,
    ),
    _rolled(kubernetes=IMAGE),
    _rolled(ecs=TASKS),
]


@pytest.fixture
def fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Any]:
    """Fills a document: a file of its own for each key that names one, on a machine that has all."""
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda *_, **__: None)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    # Most of the time of this test would be that of the YAML parser.
    monkeypatch.setattr(yaml_file, "read", lambda path, _: (json.loads(Path(path).read_text()), []))
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
    return settings_of(tmp_path, {"cells": CELLS, "operator": str(tmp_path / "operator")})


@pytest.mark.parametrize(
    ("documents", "schema", "settings"),
    [(DOCUMENTS, SCHEMA, settings_of), (OPERATORS, OPERATOR_SCHEMA, operated)],
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


@pytest.mark.parametrize(("documents", "schema"), [(DOCUMENTS, SCHEMA), (OPERATORS, OPERATOR_SCHEMA)])
def test_no_key_is_missing_among_these(documents: list[Any], schema: Mapping[str, Any]) -> None:
    said = {(place, key) for document in documents for place, key, _ in keys_in(document, schema)}
    known = {(place, key) for place, mapping in schema.items() for key in mapping.model_fields}
    assert known == said


def test_every_setting_is_a_key_of_its_name_or_is_made_of_others() -> None:
    made = {"fleet", "sources", "headers", "admin_token", "agent_token", "secret_files"}
    operated = {"remedies", "roll", "alb", "leases"}
    settings = {each.name for each in fields(Settings)} - made - operated
    assert settings == set(FileKeys.model_fields) - set(INGREDIENTS)
