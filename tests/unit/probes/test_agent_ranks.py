"""What the agent reads of NCCL's RAS service and of sysfs: bounded, and nothing where there is nothing."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from cellgate.probes import agent
from cellgate.probes.agent import COUNTERS_MAX, RANKS_MAX, Proc, counters_of, ranks_of
from tests.ras import communicator, missing, rank, ras, status

EIGHT = [rank(n, f"10.0.0.{n // 4}", 1001) for n in range(8)]
STUCK = [rank(n, f"10.0.0.{n // 4}", 1001 - (n == 5)) for n in range(8)]


def test_the_rank_that_has_not_entered_a_collective_is_told() -> None:
    with ras(status(communicator(EIGHT[:2], name="0x9"), communicator(STUCK))) as server:
        whole, part = ranks_of(server.address)
    assert server.commands == ["client protocol 2", "timeout 2", "set format json", "status"]
    assert whole["behind"] == [[5, "10.0.0.1", 1005, "AllReduce", 1000, 1001]]
    assert (whole["size"], whole["behind_count"]) == (8, 1)
    assert whole["launched"] == 8 * (1001 + 4 * 3) - 1
    assert part["behind"] == part["missing"] == part["failed"] == []


def test_ranks_that_do_not_answer_and_those_with_errors_are_told() -> None:
    ranks = [*EIGHT[:5], rank(5, "10.0.0.1", 1001, error=6), rank(6, "10.0.0.1", 1001, error=7)]
    with ras(status(communicator(ranks, [missing(7, "10.0.0.1", is_dead=True)]))) as server:
        (told,) = ranks_of(server.address)
    assert told["missing"] == [[7, "10.0.0.1", 1007, True]]
    assert told["failed"] == [[5, "10.0.0.1", 1005, 6]]


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"communicators": [{}]}', b"null", b"[" * 100_000])
def test_nonsense_is_nothing(said: bytes) -> None:
    with ras(said) as server:
        assert ranks_of(server.address) == []


def test_a_service_without_json_and_a_closed_port_are_nothing() -> None:
    with ras(status(communicator(STUCK)), has_json=False) as server:
        assert ranks_of(server.address) == []
    assert ranks_of(server.address) == []


@pytest.mark.alone
def test_a_service_that_says_too_much_or_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "RAS_S", 0.3)
    with ras(b"x" * (agent.RAS_BYTES + 1)) as server:
        assert ranks_of(server.address) == []
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ranks_of(("127.0.0.1", silent.getsockname()[1])) == []
    assert time.monotonic() - began < 2.0


def test_a_report_of_any_job_is_bounded() -> None:
    many = [rank(n, "h" * 999, n) for n in range(100)]
    comms = [communicator(many, name=f"0x{n}") for n in range(20)]
    with ras(status(*comms)) as server:
        told = ranks_of(server.address)
    assert len(told) == agent.COMMUNICATORS_MAX
    assert {len(comm["behind"]) for comm in told} == {RANKS_MAX}
    assert told[0]["behind_count"] == 99
    assert len(json.dumps(told)) < 64 << 10


def test_error_counters_of_links_and_devices_are_read(tmp_path: Path) -> None:
    files = {
        "class/infiniband/mlx5_0/ports/1/counters/link_downed": "2\n",
        "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "123456\n",
        "class/infiniband/rdmap0s6/ports/1/hw_counters/unresponsive_remote_events": "7\n",
        "class/infiniband/rdmap0s6/ports/1/hw_counters/rx_drops": "N/A (no PMA)\n",
        "devices/virtual/neuron_device/neuron3/stats/hardware/sram_ecc_uncorrected": "1\n",
        "devices/virtual/neuron_device/neuron3/neuron_core1/stats/status/timeout/total": "4\n",
        "devices/virtual/neuron_device/neuron3/neuron_core1/stats/status/success/total": "99\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert counters_of(str(tmp_path)) == {
        "mlx5_0/1 link_downed": 2,
        "rdmap0s6/1 unresponsive_remote_events": 7,
        "neuron3 sram_ecc_uncorrected": 1,
        "neuron3/neuron_core1 timeout": 4,
    }
    assert counters_of("/nowhere") == {}


def test_counters_are_bounded(tmp_path: Path) -> None:
    for n in range(100):
        port = tmp_path / f"class/infiniband/ib{n}/ports/1/counters"
        port.mkdir(parents=True)
        (port / "symbol_error").write_text("1\n")
    assert 0 < len(counters_of(str(tmp_path))) <= COUNTERS_MAX


def test_addresses_are_those_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/fib_trie").write_text(
        "Main:\n        |-- 10.0.0.5\n           /32 host LOCAL\n        |-- 10.0.0.255\n"
        "           /32 link BROADCAST\n        |-- 127.0.0.1\n           /32 host LOCAL\n"
    )
    (tmp_path / "net/if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert Proc(str(tmp_path)).addresses() == ["10.0.0.5", "fd00::7"]
