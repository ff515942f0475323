"""Real llama.cpp servers of which one has other weights: who is found, who goes, and who stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.llamacpp import LlamaServer
from tests.real.tiny_gguf import write_model
from tests.wire.process import GateProcess, eventually, metrics

pytestmark = pytest.mark.nightly

EVERY_S = 2.0
Serve = Callable[..., GateProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A gate before servers with these seeds of weights, by unit; each has a file of its own."""
    with ExitStack() as stack:

        @contextmanager
        def gate(**seeds: int) -> Iterator[GateProcess]:
            with ExitStack() as inner:
                urls = {}
                for name, seed in seeds.items():
                    write_model(tmp_path / f"{name}.gguf", seed)
                    server = LlamaServer(tmp_path / f"{name}.gguf", tmp_path / f"{name}.log")
                    urls[name] = inner.enter_context(server).url
                known_answer = {"every_s": EVERY_S}
                yield inner.enter_context(GateProcess(tmp_path, urls, known_answer=known_answer))

        yield lambda **seeds: stack.enter_context(gate(**seeds))


def spoil(tmp_path: Path, name: str) -> None:
    """Change the weights under a running server, which has its file mapped into memory."""
    write_model(tmp_path / "other.gguf", 2)
    with (tmp_path / f"{name}.gguf").open("r+b") as file:
        file.write((tmp_path / "other.gguf").read_bytes())


def verdicts(gate: GateProcess) -> dict[str, str]:
    return {name: unit["verdict"] for name, unit in gate.units().items()}


def events(gate: GateProcess, kind: str) -> list[dict[str, Any]]:
    return [event for event in gate.admin("GET", "/events")[1] if event["kind"] == kind]


def answers(gate: GateProcess, unit: str, result: str) -> float:
    line = f'cellgate_known_answers_total{{result="{result}",unit="{unit}"}} '
    return sum(float(each.removeprefix(line)) for each in metrics(gate).splitlines() if each.startswith(line))


def test_of_three_the_one_with_other_weights_goes_within_two_answers(serve: Serve) -> None:
    gate = serve(a=1, b=1, c=2)
    assert eventually(lambda: verdicts(gate) == {"a": "up", "b": "up", "c": "down"}), gate.log
    assert answers(gate, "c", "differs") <= 2
    flip = next(event for event in events(gate, "flip") if event["after"] == "down")
    assert flip["reason"].startswith("wrong answers: a, b agree on another answer")
    build = gate.units()["a"]["build"]
    assert build["fingerprint"]
    assert build["fingerprint"] == build["version"]


def test_of_two_with_other_weights_both_stay_loudly(serve: Serve) -> None:
    gate = serve(a=1, b=2)
    gate.until_up("a", "b")
    assert eventually(lambda: len(events(gate, "answers_differ")) == 2), gate.log
    assert max(answers(gate, unit, "differs") for unit in "ab") <= 3
    assert verdicts(gate) == {"a": "up", "b": "up"}
    assert metrics(gate).count('cellgate_unit_state{cell="c",state="answers_differ",unit="') == 2
    assert all(unit["odd_answers"] for unit in gate.units().values())


def test_of_two_the_one_whose_weights_change_without_a_restart_goes(serve: Serve, tmp_path: Path) -> None:
    gate = serve(a=1, b=1)
    gate.until_up("a", "b")
    assert eventually(lambda: min(answers(gate, unit, "same") for unit in "ab") >= 2)
    spoil(tmp_path, "b")
    assert eventually(lambda: verdicts(gate) == {"a": "up", "b": "down"}), gate.log
    assert answers(gate, "b", "differs") == 2
    write_back = tmp_path / "b.gguf"
    with write_back.open("r+b") as file:
        file.write((tmp_path / "a.gguf").read_bytes())
    assert eventually(lambda: verdicts(gate) == {"a": "up", "b": "up"}), gate.log
