"""Roles and transfers that cannot work are refused, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.files import problems, read, same


def cell(transfer: str, *roles: str, more: str = "") -> str:
    units = ", ".join(
        f"{{name: u{number}, url: 'http://u{number}:1', role: {role}{more}}}"
        for number, role in enumerate(roles)
    )
    return f"cells: [{{name: c, transfer: {transfer}, units: [{units}]}}]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (cell("none", "prefill", "both"), "cells[0].units[0].role: role: prefill requires a transfer of …"),
        (cell("sglang", "decode", "decode"), "cells[0].transfer: cell c has no unit with role: prefill; …"),
        (cell("sglang", "prefill", "both"), "cells[0].transfer: cell c has no unit with role: decode; …"),
        (
            cell("sglang", "both"),
            "cells[0].transfer: cell c has no unit with role: prefill and none with role: decode; …",
        ),
        (
            cell("sglang", "prefill", "decode", more=", engine: vllm"),
            "cells[0].transfer: transfer: sglang requires sglang, and unit u0 is vllm",
        ),
        (
            cell("sglang", "prefill", "decode", more=", bootstrap_port: 0"),
            "cells[0].units[0].bootstrap_port: expected a port from 1 to 65535, …",
        ),
        (cell("nixl", "prefill", "prefill"), "cells[0].transfer: cell c has no unit for answers: …"),
        (cell("nixl", "decode", "decode"), "cells[0].transfer: cell c has no pair: …"),
        (cell("nixl", "both"), "cells[0].transfer: cell c has no pair: …"),
        (
            cell("nixl", "prefill", "decode", more=", engine: sglang"),
            "cells[0].transfer: transfer: nixl requires vllm, and unit u0 is sglang",
        ),
        (
            cell("nixl", "prefil", "decode"),
            "cells[0].units[0].role: expected a role: both, prefill, decode, …",
        ),
        (cell("infiniband", "prefill"), "cells[0].transfer: expected a transfer: none, nixl, sglang, …"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    found = problems(tmp_path, text)
    assert any(same(one, f"…{problem}") for one in found), found


@pytest.mark.parametrize(
    "roles", [("prefill", "decode"), ("both", "both"), ("prefill", "both"), ("both", "decode")]
)
def test_what_can_work_is_taken(tmp_path: Path, roles: tuple[str, ...]) -> None:
    cells = read(tmp_path, cell("nixl", *roles)).fleet.cells
    assert cells[0].transfer == "nixl"


def test_sglang_has_pairs_and_units_for_whole_requests(tmp_path: Path) -> None:
    fleet = read(tmp_path, cell("sglang", "prefill", "decode", "both", more=", bootstrap_port: 9000")).fleet
    assert fleet.cells[0].transfer == "sglang"
    assert [unit.bootstrap_port for unit in fleet.units] == [9000] * 3
