"""`discover` of a cell: what it makes, and what is said of one that is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.settings import DnsSource, EcsSource, FileSource, LwsSource, Settings
from cellgate.router.nouns import Unit


def read(tmp_path: Path, discover: str, environ: dict[str, str] | None = None) -> Settings:
    path = tmp_path / "cellgate.yaml"
    path.write_text(f"cells:\n- name: c\n  weight: 2\n  discover: {discover}\n")
    return load(str(path), Overrides(), environ or {})


def problem(tmp_path: Path, discover: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, discover)
    (line,) = refused.value.problems
    return line.removeprefix(f"{tmp_path}/cellgate.yaml: cells[0].")


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
        ("{from: file, path: units.yaml}", FileSource(like(), "units.yaml")),
        (
            "{from: lws, name: big, port: 8000, agent_port: 9902, unit: {engine: vllm, max_in_flight: 9}}",
            LwsSource(like(engine="vllm", max_in_flight=9), "big", 8000, agent_port=9902),
        ),
        (
            "{from: ecs, cluster: prod, services: [a, b], port: 8000, region: eu-west-1}",
            EcsSource(like(), "prod", 8000, ("a", "b"), "eu-west-1"),
        ),
    ],
)
def test_a_cell_may_be_discovered(tmp_path: Path, discover: str, source: object) -> None:
    settings = read(tmp_path, discover)
    assert settings.sources == (source,)
    assert (settings.fleet.units, [cell.name for cell in settings.fleet.cells]) == ((), ["c"])


def test_the_key_for_units_reaches_those_that_are_discovered(tmp_path: Path) -> None:
    (source,) = read(tmp_path, "{from: file, path: x}", {"CELLGATE_UNIT_API_KEY": "secret"}).sources
    assert isinstance(source, FileSource)
    assert source.like.api_key == "secret"
    assert "secret" not in repr(source)


@pytest.mark.parametrize(
    ("discover", "says"),
    [
        (
            "{from: lsw, name: x}",
            "discover.from: expected a source: dns, ecs, file, lws, found 'lsw'; did you mean 'lws'?",
        ),
        ("{from: lws, nam: big, name: big, port: 1}", "discover.nam: unknown key; did you mean 'name'?"),
        ("{from: lws, port: 8000}", "discover: from: lws requires name"),
        (
            "{from: lws, name: big, port: 8000, cluster: c}",
            "discover: from: lws does not take cluster; it takes name, port, namespace, agent_port, scheme, "
            "kubeconfig, places, unit",
        ),
        (
            "{from: file, path: x, unit: {weight: 2}}",
            "discover: from: file does not take unit; it takes path",
        ),
        ("{from: dns, host: a}", "discover: from: dns requires port, except with record: SRV"),
        (
            "{from: dns, host: a, record: SRV, port: 80}",
            "discover: record: SRV does not take port: each record has its own",
        ),
        (
            "{from: dns, host: a, record: srv}",
            "discover.record: expected a record type: A, AAAA, SRV, found 'srv'",
        ),
        ("{from: lws, name: big, port: 0}", "discover.port: expected a port from 1 to 65535, found 0"),
        (
            "{from: ecs, cluster: a, port: 80, services: a}",
            "discover.services: expected a list of service names, found 'a'; did you mean [a]?",
        ),
        (
            "{from: lws, name: big, port: 8000, unit: {max_in_flite: 2}}",
            "discover.unit.max_in_flite: unknown key; did you mean 'max_in_flight'?",
        ),
        ("[dns]", "discover: expected a mapping, found a list"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_right(tmp_path: Path, discover: str, says: str) -> None:
    assert problem(tmp_path, discover) == says


def test_a_missing_package_is_said_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problem(tmp_path, "{from: lws, name: big, port: 8000}") == (
        "discover: from: lws requires a package that is not installed: pip install 'cellgate[k8s]'"
    )


def test_a_cell_without_units_and_without_discovery_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cellgate.yaml"
    path.write_text("cells:\n- name: c\n")
    with pytest.raises(ConfigError, match="units: required key is missing"):
        load(str(path), Overrides(), {})
