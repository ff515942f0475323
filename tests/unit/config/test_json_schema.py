"""The JSON Schema and the models agree: on every key, on the files that are shipped, on what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from cellgate.proxy.cli.main import main
from cellgate.proxy.config.actions import OPERATOR_SCHEMA
from cellgate.proxy.config.schema import SCHEMA, json_schema
from tests.unit.config.files import CELLS, FULL, ROOT, problems

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


def test_it_is_a_schema_and_has_every_key_of_the_models() -> None:
    Draft202012Validator.check_schema(json_schema())
    assert mappings(json_schema()) == {place: list(keys.model_fields) for place, keys in SCHEMA.items()}


def test_so_is_that_of_the_operators_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--operator"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    keys = {place: list(mapping.model_fields) for place, mapping in OPERATOR_SCHEMA.items()}
    assert mappings(schema) == keys
    example = yaml.safe_load((ROOT / "deploy" / "recovery" / "operator.yaml").read_text())
    assert [error.message for error in Draft202012Validator(schema).iter_errors(example)] == []


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_configuration_that_is_shipped_keeps_to_it(file: Path) -> None:
    assert [error.message for error in CHECKER.iter_errors(yaml.safe_load(file.read_text()))] == []


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
        "policy: best",
        "access_log: on",
        "rules: {attempts: 1.1}",
        "timeouts: {connect_s: 0}",
        "timeouts: {drain_s: soon}",
        "limits: {body_bytes: 64MB}",
        "pass_unlisted: 1",
        "trusted: 10.0.0.0/8",
        "tls: {certificate: x}",
        "listen: 8000",
    ],
)
def test_what_it_refuses_the_gate_refuses(tmp_path: Path, text: str) -> None:
    assert list(CHECKER.iter_errors(yaml.safe_load(CELLS + text)))
    assert problems(tmp_path, CELLS + text)
