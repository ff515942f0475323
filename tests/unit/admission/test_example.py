"""The guardrail in deploy/: what it finds, and what it answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides

FOLDER = Path(__file__).parents[3] / "deploy" / "guardrail"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_guardrail", FOLDER / "guardrail.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requests_are_changed(example: ModuleType) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "I am jo@x.org, card 4111 1111 1111 1111."}],
    }
    told = example.verdict({"phase": "request", "body": body}, example.by_patterns)
    assert told["action"] == "change"
    assert told["body"]["messages"][0]["content"] == "I am <EMAIL>, card <CARD>."
    assert told["body"]["model"] == "m"
    plain = {"phase": "request", "body": {"prompt": "order 4111 1111 1111 1112"}}
    assert example.verdict(plain, example.by_patterns) == {"action": "allow"}


def test_finds_that_overlap_are_replaced_once(example: ModuleType) -> None:
    text = "pay DE12 4111 1111 1111 1111 to jo@x.org and 5 more"
    assert {"IBAN", "CARD"} <= {name for _, _, name in example.by_patterns(text)}
    assert example.masked(text, example.by_patterns) == "pay <IBAN> to <EMAIL> and 5 more"
    parts = [(4, 9, "B"), (2, 6, "A"), (9, 11, "C")]
    assert example.masked("0123456789abc", lambda _: parts) == "01<A><C>bc"


def test_answers_are_denied(example: ModuleType) -> None:
    asked = {"phase": "answer", "context": "write to jo@", "text": "x.org", "final": True}
    assert example.verdict(asked, example.by_patterns) == {"action": "deny", "reason": "it has EMAIL"}
    whole = {"phase": "answer", "body": {"choices": [{"message": {"content": "no data"}}]}}
    assert example.verdict(whole, example.by_patterns) == {"action": "allow"}


def test_its_configuration_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text((FOLDER / "cellgate.yaml").read_text())
    settings = load(str(file), Overrides())
    assert settings.guardrail is not None
    assert (settings.guardrail.answer, settings.guardrail.target) == ("windows", "/check")
