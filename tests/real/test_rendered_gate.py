"""The gate that the chart renders, with the files that it mounts: it is checked, it starts, and it serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.settings import Settings, is_token
from deploy.render import CHART, configuration, rendered
from loadtests.simunit.process import sim_units
from tests.manifests import Thing, containers
from tests.real.certificates import Certificate, authority, signed_by
from tests.real.programs import find, free_port, running
from tests.wire.process import PATIENCE_S, eventually

EXAMPLES = [path.stem for path in sorted(CHART.glob("examples/*.yaml"))]
FILES = {
    "keys": "clients",
    "tls": "certificate",
    "adminTls": "certificate",
    "unitApiKey": "engine-key",
    "usageLog": "usage",
}
ALL_FILES = "--set=" + ",".join(f"files.{name}={of}" for name, of in FILES.items())
KEY, ADMIN = "sk-of-alice", "token-of-the-operator"


class Pod(NamedTuple):
    """A gate's container in a folder instead of an image: its files, and its environment."""

    root: Path
    config: Path
    environ: dict[str, str]

    def settings(self) -> Settings:
        """What `cellgate check` and `serve` read there. Raises ConfigError."""
        return load(str(self.config), Overrides(), self.environ)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    find("openssl")
    folder = tmp_path_factory.mktemp("certificates")
    return signed_by(authority(folder), folder, "gate")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Path:
    """A folder for each Secret that a values file may name, with its keys as files."""
    root = tmp_path_factory.mktemp("secrets")
    line = {"key": "alice", "sha256": sha256(KEY.encode()).hexdigest()}
    for name in ("clients", "cellgate-keys"):
        (root / name).mkdir()
        (root / name / "keys.jsonl").write_text(json.dumps(line) + "\n")
    for name in ("certificate", "cellgate-tls"):
        (root / name).mkdir()
        shutil.copy(certificate.cert, root / name / "tls.crt")
        shutil.copy(certificate.key, root / name / "tls.key")
    for name in ("cellgate", "cellgate-router"):
        (root / name).mkdir()
        for key in ("admin-token", "agent-token", "fleet-secret", "redis-password"):
            (root / name / key).write_text("word-of-a-secret\n")
        (root / name / "admin-token").write_text(f"sha256:{sha256(ADMIN.encode()).hexdigest()}\n")
    (root / "engine-key").mkdir()
    (root / "engine-key" / "api-key").write_text("key-of-the-engine\n")
    return root


def pod(found: list[Thing], root: Path, cluster: Path, *, url: str = "") -> Pod:
    """What Kubernetes would make of the gate's container: each mount a folder under `root`."""
    text = configuration(found)
    [(container, spec)] = [each for each in containers(found) if each[0]["name"] == "cellgate"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        place, volume = root / mount["mountPath"].lstrip("/"), volumes[mount["name"]]
        if "secret" in volume:
            shutil.copytree(cluster / volume["secret"]["secretName"], place)
        else:
            place.mkdir(parents=True)
        text = text.replace(f"{mount['mountPath']}/", f"{place}/")
    if url:
        text = text.replace("http://127.0.0.1:8001", url)
    config = root / "etc" / "cellgate" / "cellgate.yaml"
    config.write_text(text)
    given = {each["name"]: each.get("value", "word-of-a-secret") for each in container["env"]}
    path = {"PATH": os.environ["PATH"]}
    return Pod(root, config, path | given | {"POD_NAME": "big-0"})


def things(example: str, *flags: str) -> list[Thing]:
    return [each for each in yaml.safe_load_all(rendered(find("helm"), example, "cellgate", *flags)) if each]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_gate_takes_the_configuration_with_what_is_mounted(
    example: str, tmp_path: Path, cluster: Path
) -> None:
    for number, flags in enumerate([[], [ALL_FILES]]):
        assert pod(things(example, *flags), tmp_path / str(number), cluster).settings()


@pytest.mark.parametrize("example", EXAMPLES)
def test_replicas_of_one_template_take_the_admin_token_and_none_of_them_has_it(
    example: str, tmp_path: Path, cluster: Path
) -> None:
    """What one of them has is good at no other one, nor is what all of them have in common."""
    gate = pod(things(example), tmp_path, cluster)
    token = gate.settings().admin_token
    assert token is not None
    assert is_token(ADMIN.encode(), token)
    files = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()]
    had = [
        *(word for text in files for word in text.split()),
        *(word.encode() for word in gate.environ.values()),
    ]
    assert not any(is_token(word, token) for word in had)


def test_each_file_is_mounted_where_the_configuration_looks_and_the_engine_has_the_key_of_the_gate(
    tmp_path: Path, cluster: Path
) -> None:
    found = things("sidecar", ALL_FILES)
    [unit] = pod(found, tmp_path / "all", cluster).settings().fleet.units
    assert unit.api_key == "key-of-the-engine"
    leader = next(each for each, _ in containers(found) if each["name"] == "engine")
    [asked] = [each for each in leader["env"] if each["name"] == "VLLM_API_KEY"]
    assert asked["valueFrom"]["secretKeyRef"] == {"name": "engine-key", "key": "api-key"}
    [(container, _)] = [each for each in containers(found) if each[0]["name"] == "cellgate"]
    mounts = container["volumeMounts"]
    for missing in FILES:
        place = "/log/cellgate" if missing == "usageLog" else f"/{missing}"
        container["volumeMounts"] = [each for each in mounts if not each["mountPath"].endswith(place)]
        assert len(container["volumeMounts"]) == len(mounts) - 1 == 2 + len(FILES)
        with pytest.raises(ConfigError):
            pod(found, tmp_path / missing, cluster).settings()


@pytest.fixture
def unit() -> Iterator[str]:
    with sim_units(["big"]) as [made]:
        yield made.url


def test_a_rendered_gate_serves_keys_by_https_and_logs_their_use(
    tmp_path: Path, cluster: Path, certificate: Certificate, unit: str
) -> None:
    # Without followers, whose agents would be hosts of the cluster.
    flags = ["--set=engine.nodes=1,engine.tensorParallel=8", ALL_FILES]
    gate = pod(things("sidecar", *flags), tmp_path, cluster, url=unit)
    port, admin = free_port(), free_port()
    places = ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    command = [sys.executable, "-m", "cellgate", "serve", "-c", str(gate.config), *places]
    trusted = ssl.create_default_context(cafile=str(Path(certificate.cert).with_name("ca.pem")))

    def answer(url: str, key: str = "", body: dict[str, object] | None = None) -> int:
        lines = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        asked = urllib.request.Request(url, json.dumps(body).encode() if body else None, lines)
        try:
            with urllib.request.urlopen(asked, timeout=10, context=trusted) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    log = tmp_path / "gate.log"
    words = " ".join(f"{name}={value}" for name, value in gate.environ.items() if " " not in value)
    with running(["env", "-i", *words.split(), *command], log) as process:
        assert eventually(lambda: answer(f"https://127.0.0.1:{admin}/readyz") == 200), log.read_text()
        url = f"https://127.0.0.1:{port}/v1/chat/completions"
        body: dict[str, object] = {"model": "sim", "max_tokens": 5}
        body["messages"] = [{"role": "user", "content": "hello"}]
        assert answer(url, "", body) == 401
        assert answer(url, "sk-of-nobody", body) == 401
        assert answer(url, KEY, body) == 200
        usage = tmp_path / "var" / "log" / "cellgate" / "big-0.jsonl"
        assert eventually(usage.exists)
        assert eventually(lambda: usage.read_text().endswith("}\n"))
        assert json.loads(usage.read_text())["key"] == "alice"
        # At once: nobody has a stream.
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
