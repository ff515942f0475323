"""`${NAME}` in a configuration: what it becomes, where it is left, and one line for what is not set."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.yaml_file import VariableError, replaced
from tests.unit.config.files import CELLS

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


def test_values_of_a_file_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("""
listen: ${HOST}:${PORT:-80}
cells:
  - name: "${NO}"
    weight: ${WEIGHT}
    units:
      - {name: a1, url: "http://${HOST}:8000", max_in_flight: 3}
""")
    settings = load(str(file), Overrides(), ENVIRON)
    assert str(settings.listen) == "10.0.0.7:80"
    [cell] = settings.fleet.cells
    assert (cell.name, cell.weight) == ("no", 2.5)
    assert settings.fleet.units[0].url == "http://10.0.0.7:8000"


def test_a_variable_cannot_add_a_key(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(CELLS + "redis: ${TRICK}\n")
    assert load(str(file), Overrides(), ENVIRON).redis is not None
    assert str(load(str(file), Overrides(), ENVIRON).admin) == "127.0.0.1:9901"


def test_each_variable_that_is_not_set_is_one_line_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("listen: ${LISTEN}\nworkers: &n ${N}\nadvertise: *n\nredis: 'x${'\n")
    with pytest.raises(ConfigError) as caught:
        load(str(file), Overrides(), ENVIRON)
    assert [line.removeprefix(f"{file}:") for line in caught.value.problems] == [
        "1:9: the variable LISTEN is not set; set it, or write ${LISTEN:-DEFAULT}",
        "2:10: the variable N is not set; set it, or write ${N:-DEFAULT}",
        "4:8: expected ${NAME} or ${NAME:-DEFAULT}, found 'x${'; write $${ for ${ itself",
    ]


def test_within_braces_a_reference_needs_quotes_and_the_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("cells: [{name: ${NO}, units: []}]\n")
    with pytest.raises(ConfigError, match=r"gate.yaml:1:\d+: expected YAML, .*; put \$\{…\} in quotes"):
        load(str(file), Overrides(), ENVIRON)


def test_a_minus_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CELLS.encode())))
    assert [unit.name for unit in load("-", Overrides()).fleet.units] == ["a1"]
