"""Envoy with the project's own configuration, before gates of a test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.real.asking import get
from tests.real.programs import ROOT, find, free_port, running, tail

CONFIGURATION = ROOT / "deploy" / "ingress" / "envoy.yaml"


class Host(NamedTuple):
    """What Envoy thinks of one gate. `healthy`: not out for any reason; `degraded`: after all others."""

    weight: int
    healthy: bool
    degraded: bool
    status: dict[str, Any]


class Envoy:
    """A running Envoy."""

    def __init__(self, port: int, admin_port: int, log: Path) -> None:
        self.port = port
        self._admin_port = admin_port
        self.log = log

    async def hosts(self) -> dict[int, Host]:
        """Its gates, by port."""
        status, body = await get(self._admin_port, "/clusters?format=json")
        if status != 200:
            return {}
        (cluster,) = json.loads(body)["cluster_statuses"]
        return {_port(host): _host(host) for host in cluster.get("host_statuses", ())}

    async def stats(self, pattern: str) -> dict[str, int]:
        """Its numbers whose names match."""
        _, body = await get(self._admin_port, f"/stats?filter={pattern}")
        pairs = (line.split(": ") for line in body.splitlines() if ": " in line)
        return {name: int(value) for name, value in pairs if value.isdigit()}


@contextmanager
def envoy(folder: Path, gates: Sequence[int], checks: Sequence[int] = ()) -> Iterator[Envoy]:
    """Envoy before gates on these ports, for as long as the context lasts. `checks` are the ports whose
    /readyz is asked, where these are others.
    """
    program = find("envoy")
    port, admin_port = free_port(), free_port()
    config = yaml.safe_load(CONFIGURATION.read_text())
    (listener,), (cluster,) = (config["static_resources"][name] for name in ("listeners", "clusters"))
    listener["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    config["admin"]["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": admin_port}
    places = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len(places) == len(gates)
    for place, gate, check_port in zip(places, gates, checks or gates, strict=True):
        place["endpoint"]["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": gate}
        place["endpoint"]["health_check_config"] = {"port_value": check_port}
    # What takes ten seconds and one in the field, so that a test does not.
    balancing = cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    balancing |= {"blackout_period": "1s", "weight_update_period": "0.1s"}
    (check,) = cluster["health_checks"]
    check |= {"interval": "0.2s", "no_traffic_interval": "0.2s"}
    file, log = folder / "envoy.json", folder / "envoy.log"
    file.write_text(json.dumps(config))
    command = [program, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with running(command, log):
        try:
            yield Envoy(port, admin_port, log)
        except BaseException:
            print(tail(log))
            raise


def _port(host: dict[str, Any]) -> int:
    return int(host["address"]["socket_address"]["port_value"])


def _host(host: dict[str, Any]) -> Host:
    status = host["health_status"]
    flags = {name for name, value in status.items() if value is True}
    degraded = "failed_active_degraded_check" in flags
    return Host(host.get("weight", 1), not flags - {"failed_active_degraded_check"}, degraded, status)
