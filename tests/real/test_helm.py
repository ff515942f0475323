"""The chart, rendered by Helm: Kubernetes knows every field, the gate its configuration, and parts fit."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import CHART, RELEASES, SHIPPED, configuration, files, rendered, values_schema
from tests.documented import Typed, typed
from tests.manifests import DEPLOY, Thing, containers, pod_templates, selects, validate
from tests.real.programs import ROOT, find, python_of

EXAMPLES = [path.stem for path in sorted(CHART.glob("examples/*.yaml"))]
OF_OTHERS = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1", "gateway.networking.k8s.io/v1")
"""Kinds of other projects, whose schemas are not here: their fields are looked at one by one below."""
NO_LABELS = ("", "Big", "big_one", "big.one", "-big", "big-", "1big", "b" * 46)
"""None of these can be the name of a LeaderWorkerSet, whose pods and Service are called after it."""


@pytest.fixture(scope="module")
def helm() -> str:
    """Helm's program."""
    return find("helm")


def things(helm: str, example: str, *flags: str) -> list[Thing]:
    return [thing for thing in yaml.safe_load_all(rendered(helm, example, "cellgate", *flags)) if thing]


def of_kind(found: list[Thing], kind: str, name: str = "") -> Thing:
    [thing] = [each for each in found if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    return thing


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_and_kubernetes_know_every_field_and_what_belongs_together_fits(helm: str, example: str) -> None:
    values = str(CHART / "examples" / f"{example}.yaml")
    done = subprocess.run(
        [helm, "lint", "--strict", CHART, "-f", values], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = things(helm, example)
    pods = [template["metadata"]["labels"] for thing in found for template in pod_templates(thing)]
    for thing in found:
        if thing["apiVersion"] not in OF_OTHERS:
            validate(thing)
        spec = thing.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if thing["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
            assert any(selects(selector, labels) for labels in pods), thing["metadata"]["name"]
    # Pods have the time that their streams need.
    timeouts = yaml.safe_load(configuration(found))["timeouts"]
    for container, pod in containers(found):
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        if container["name"] == "cellgate":
            assert grace_s > timeouts["drain_delay_s"] + timeouts["drain_s"]
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if command[:1] == ["sleep"]:
            assert grace_s > int(command[1])


@pytest.mark.parametrize("example", ["cell", "sidecar", "everything"])
def test_an_engine_has_what_a_real_one_needs(helm: str, example: str) -> None:
    found = things(helm, example)
    group = of_kind(found, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for container, pod in containers(found):
        if container["name"] != "engine":
            continue
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["/models"].keys() & {"emptyDir", "persistentVolumeClaim"}
        flags = dict(arg.removeprefix("--").split("=") for arg in container["args"] if "=" in arg)
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group["size"]
        assert int(flags["tensor-parallel-size"]) * int(flags["pipeline-parallel-size"]) == gpus
        assert int(flags["nnodes"]) == group["size"]
        assert re.search(r":v\d+\.\d+\.\d+$", container["image"])
        if "--headless" not in container["args"]:
            probe = container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_with_everything_the_hubs_token_is_a_secret_monitors_find_ports_and_scalers_scale(helm: str) -> None:
    found = things(helm, "everything")
    engines = [each for each, _ in containers(found) if each["name"] == "engine"]
    for engine in engines:
        [token] = [each for each in engine["env"] if each["name"] == "HF_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    monitor, service = of_kind(found, "ServiceMonitor"), of_kind(found, "Service", "cellgate-admin")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "cellgate"
    [endpoint] = of_kind(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    [leader] = [each for each in engines if "--headless" not in each["args"]]
    assert endpoint["port"] in [port["name"] for port in leader["ports"]]
    gate = of_kind(found, "Deployment")["spec"]["template"]
    assert [each["name"] for each in gate["spec"]["containers"]] == ["cellgate", "log-shipper"]
    assert "@sha256:" in gate["spec"]["containers"][0]["image"]
    assert gate["metadata"]["labels"]["team"] == "inference"
    assert "eks.amazonaws.com/role-arn" in of_kind(found, "ServiceAccount")["metadata"]["annotations"]
    [rule] = of_kind(found, "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] in [
        each["metadata"]["name"] for each in found if each["kind"] == "Service"
    ]
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text())
    assert of_kind(found, "PrometheusRule")["spec"] == rules
    shown = of_kind(found, "ConfigMap", "cellgate-dashboard")["data"]["cellgate.json"]
    assert json.loads(shown) == json.loads((ROOT / "deploy" / "monitoring" / "dashboard.json").read_text())
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        target = of_kind(found, kind)["spec"]["scaleTargetRef"]
        assert "replicas" not in of_kind(found, target["kind"], target["name"])["spec"]
    [trigger] = of_kind(found, "ScaledObject")["spec"]["triggers"]
    page = (ROOT / "docs" / "metrics.md").read_text()
    named = re.findall(r"cellgate_\w+", trigger["metadata"]["query"])
    assert len(named) == 2
    assert all(f"| `{metric}`" in page for metric in named)


def test_beside_a_gate_nothing_else_is_reached(helm: str) -> None:
    [(engine, _)] = [
        each
        for each in containers(things(helm, "sidecar"))
        if each[0]["name"] == "engine" and "--headless" not in each[0]["args"]
    ]
    assert "--host=127.0.0.1" in engine["args"]
    assert "ports" not in engine


def secrets_of(found: list[Thing], container: Thing) -> set[str]:
    """The tokens that a container has as files, each a key of the Secret that must be there."""
    [pod] = [pod for each, pod in containers(found) if each is container]
    [mounted] = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/cellgate-secrets"]
    [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == mounted["name"]]
    assert "optional" not in volume
    return {item["path"] for item in volume["items"]}


@pytest.mark.parametrize("example", EXAMPLES)
def test_tokens_are_files_of_those_who_need_them_and_in_no_variable_that_must_be_there(
    helm: str, example: str
) -> None:
    found = things(helm, example)
    for container, _ in containers(found):
        variables = {each["name"]: each.get("valueFrom", {}) for each in container.get("env", ())}
        secret = {name: value["secretKeyRef"] for name, value in variables.items() if "secretKeyRef" in value}
        if container["name"] in ("cellgate", "cellgate-agent"):
            assert all(each.get("optional") for each in secret.values())
            named = secrets_of(found, container)
            assert named == {"agent-token"} or "admin-token" in named
        else:
            assert not any("cellgate-secrets" in str(each) for each in container.get("volumeMounts", ()))


def test_the_redis_of_a_fleet_is_for_gates_alone(helm: str) -> None:
    """An engine of a cell bears the chart's label too, and may be hostile: it has no way in."""
    named = '--set-json=networkPolicy.gates=["cell-a","cell-b"]'
    for flags in ([], ["--set=redis.tls=fleet-tls", named]):
        found = things(helm, "fleet-router", *flags)
        for thing in found:
            validate(thing)
        policy = of_kind(found, "NetworkPolicy", "cellgate-redis")
        [peer] = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
        [where] = peer["namespaceSelector"]["matchExpressions"]
        assert where["values"] == (["cell-a", "cell-b"] if flags else ["default"])
        wanted = peer["podSelector"]["matchLabels"].items()
        assert (
            wanted
            <= of_kind(found, "Deployment", "cellgate")["spec"]["template"]["metadata"]["labels"].items()
        )
        group = of_kind(things(helm, "cell"), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        for template in ("leaderTemplate", "workerTemplate"):
            assert not wanted <= group[template]["metadata"]["labels"].items()
        [redis] = [each for each, _ in containers(found) if each["name"] == "redis"]
        [gate] = [each for each, _ in containers(found) if each["name"] == "cellgate"]
        assert redis["args"][redis["args"].index("--requirepass") + 1] == "$(REDIS_PASSWORD)"
        assert ("--tls-port" in redis["args"]) == bool(flags)
        assert [each["name"] for each in gate["env"]] == ["POD_NAME"]
        assert secrets_of(found, gate) == {"admin-token", "fleet-secret", "redis-password"}
        scheme = "rediss" if flags else "redis"
        assert f"{scheme}://cellgate-redis:6379/0" in json.dumps(found)


def test_an_engine_may_trace_no_other_process_of_its_pod(helm: str) -> None:
    """It runs as root, and shares its processes with the gate of a sidecar, who is another user."""
    for example in ("cell", "sidecar"):
        for container, pod in containers(things(helm, example)):
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            if container["name"] == "cellgate":
                user = context.get("runAsUser", pod.get("securityContext", {}).get("runAsUser"))
                assert user not in (None, 0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=mode=mesh"], "mode: expected cell, sidecar or fleet, found mesh"),
        (
            ["--set=engine.tensorParallel=8"],
            "pipelineParallel is 8, but nodes x gpusPerNode is 16: make them equal",
        ),
        (["--set=mode=sidecar", "--set=engine.create=false"], "engine.create must be true"),
        (["--set=engnie.model=x"], "engnie"),
        (["--set=engine.modle=x"], "modle"),
        (["--set=gate.replicas=two"], "replicas"),
        (["--set=engine.model="], "engine.model: is required, and empty"),
        (["--set=engine.model=YOUR-ORG/YOUR-MODEL"], "engine.model: YOUR-ORG/YOUR-MODEL stands for"),
        (["--set=engine.model=ORG/MODEL"], "engine.model: ORG/MODEL stands for something of yours"),
        (["--set=image.repository="], "image.repository: is required, and empty"),
        (["--set=image.repository=ghcr.io/your-org/cellgate"], "image.repository: ghcr.io/your-org/cellgate"),
        (["--set=image.repository=$REGISTRY/cellgate"], "image.repository: $REGISTRY/cellgate stands for"),
        (["--set=secret.name="], "secret.name: is required"),
        (["--set=engine.image.tag="], "engine.image.tag: is required"),
        *((["--set-string=engine.name=" + name], "engine.name: expected a DNS label") for name in NO_LABELS),
        (["--set=engine.name=cellgate"], "engine.name: cellgate is a Service of the release already"),
        (["--set=engine.name=cellgate-admin"], "is a Service of the release already"),
        (["--set=engine.units=0"], "engine.units: expected at least 1, found 0"),
        (["--set=engine.maxInFlight=0"], "engine.maxInFlight: expected at least 1, found 0"),
        (["--set=gate.replicas=0"], "gate.replicas: expected at least 1, found 0"),
        (["--set=service.type=Loadbalancer"], "service.type: expected ClusterIP, NodePort or LoadBalancer"),
        (["--set=engine.create=false"], "engine.create is false: name the units in config.cells"),
        (["--set=files.usageLog=usage"], "files.usageLog: what is logged is the use of keys"),
        (["--set=monitoring.serviceMonitor.enabled=true"], "networkPolicy.operators: name the namespace"),
        (["--set=config.polcy=p2c"], "config: Additional property polcy is not allowed"),
        (["--set=route.enabled=true"], "route.parentRefs: name the Gateway"),
        (["--set=autoscaling.gate.enabled=true,gate.replicas=5"], "autoscaling.gate.maxReplicas: expected"),
        (
            ["--set=autoscaling.units.enabled=true,autoscaling.units.minUnits=9"],
            "maxUnits: expected at least",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(helm: str, flags: list[str], says: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        rendered(helm, "cell", "cellgate", *flags)
    assert says in failed.value.stderr


def test_without_a_value_nothing_is_installed(helm: str) -> None:
    done = subprocess.run([helm, "template", "gate", CHART], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "is required, and empty" in done.stderr


@pytest.mark.parametrize("each", [one for one in typed("helm") if "-f" in one.words], ids=str)
def test_what_a_page_installs_is_rendered_and_known(helm: str, each: Typed, tmp_path: Path) -> None:
    """With the values that the page has as a block, where it names a file of one's own."""
    words = ["template" if word == "install" else word for word in each.words[1:]]
    for word in [word for word in words if word.endswith(".yaml") and "/" not in word]:
        [values] = re.findall(r"```yaml\n(.*?)```", (ROOT / each.page).read_text(), re.DOTALL)
        (tmp_path / word).write_text(values)
        words[words.index(word)] = str(tmp_path / word)
    done = subprocess.run([helm, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for thing in yaml.safe_load_all(done.stdout):
        if thing["apiVersion"] not in OF_OTHERS:
            validate(thing)


@pytest.mark.parametrize("release", ["1st", "a.b"])
def test_a_release_whose_services_could_have_no_name_is_refused(helm: str, release: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        rendered(helm, "cell", release)
    assert f"expected a DNS label that begins with a letter, found {release}" in failed.value.stderr


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_admin_port_is_reached_inside_the_cluster_by_operators_alone(
    helm: str, example: str, kind: str
) -> None:
    found = things(helm, example, f"--set=service.type={kind}")
    services = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Service"}
    assert services["cellgate"]["type"] == kind
    assert [port["name"] for port in services["cellgate"]["ports"]] == ["http"]
    assert services["cellgate-admin"]["type"] == "ClusterIP"
    assert services["cellgate-admin"]["selector"] == services["cellgate"]["selector"]
    [rule] = [
        rule
        for rule in of_kind(found, "NetworkPolicy", "cellgate")["spec"]["ingress"]
        if {"port": 9901} in rule.get("ports", ())
    ]
    assert rule["from"]


PLACED = {
    "affinity": {"nodeAffinity": {}},
    "nodeSelector": {"pool": "a"},
    "priorityClassName": "high",
    "tolerations": [{"key": "pool", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "zone",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"a": "b"}},
        }
    ],
}
ADDED = {
    "extraEnv": ("env", {"name": "MORE", "value": "1"}),
    "envFrom": ("envFrom", {"secretRef": {"name": "more"}}),
    "extraVolumeMounts": ("volumeMounts", {"name": "more", "mountPath": "/more"}),
}
VOLUME = {"name": "more", "configMap": {"name": "more"}}


@pytest.mark.parametrize("example", ["cell", "sidecar", "fleet-router"])
@pytest.mark.parametrize("whose", ["gate", "engine"])
def test_pods_go_where_they_are_told_with_what_is_added_to_them(helm: str, example: str, whose: str) -> None:
    added = {name: [each] for name, (_, each) in ADDED.items()} | {"extraVolumes": [VOLUME]}
    flags = [f"--set-json={whose}.{key}={json.dumps(value)}" for key, value in (PLACED | added).items()]
    found = things(helm, example, *flags)
    name = "cellgate" if whose == "gate" else "engine"
    its = [(container, pod) for container, pod in containers(found) if container["name"] == name]
    assert len(its) == (
        0 if (whose, example) == ("engine", "fleet-router") else 2 if whose == "engine" else 1
    )
    for container, pod in its:
        assert all(each in container[place] for place, each in ADDED.values())
        assert VOLUME in pod["volumes"]
        if (whose, example) != ("gate", "sidecar"):
            assert PLACED.items() <= pod.items()
    for thing in found:
        validate(thing)


def test_the_chart_has_the_alerts_and_the_dashboard_as_they_are() -> None:
    for name in SHIPPED:
        assert (CHART / "files" / name).read_text() == (ROOT / "deploy" / "monitoring" / name).read_text()


def test_the_schema_is_that_of_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert json.loads((CHART / "values.schema.json").read_text()) == values_schema(values)


@pytest.mark.parametrize("example", RELEASES)
def test_what_kustomize_takes_is_what_the_chart_makes(helm: str, example: str) -> None:
    made = files(rendered(helm, example, RELEASES[example]), example)
    for name, text in made.items():
        assert (DEPLOY / "kubernetes" / example / name).read_text() == text, "run: python -m deploy.render"


EXPLAINED = {
    "CKV_K8S_11": "no CPU limits: a gate that is throttled delays every stream; its requests are set",
    "CKV_K8S_15": "images are pulled if not present: a tag of a release never changes",
    "CKV_K8S_21": "the namespace is that of `helm install --namespace`, or of kustomization.yaml",
    "CKV_K8S_35": "tokens come from a Secret as variables, as the gate reads them; files work as well",
    "CKV_K8S_38": "a gate that discovers pods needs its service account's token; others mount none",
    "CKV_K8S_43": "the digest of an image is the operator's: `image.tag` takes TAG@sha256:DIGEST",
}
"""Rules of Checkov for Kubernetes that are broken, and why."""


@pytest.mark.nightly
def test_each_rule_of_checkov_is_kept_or_broken_for_a_reason(helm: str, tmp_path: Path) -> None:
    python = python_of("checkov")
    for example in CHART.glob("examples/*.yaml"):
        (tmp_path / example.name).write_text(rendered(helm, example.stem))
    command = [python, str(Path(python).with_name("checkov")), "-d", str(tmp_path)]
    command += ["--framework", "kubernetes", "-o", "json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["summary"]["passed"] > 100
    assert found["summary"]["parsing_errors"] == 0
    broken = {each["check_id"]: each["check_name"] for each in found["results"]["failed_checks"]}
    assert broken.keys() == EXPLAINED.keys(), broken


def test_a_gate_may_read_pools_where_it_follows_one_and_only_there(helm: str) -> None:
    def rights(*flags: str) -> list[Any]:
        return [rule["resources"] for rule in of_kind(things(helm, "cell", *flags), "Role")["rules"]]

    follows = "config.cells[0].name=a,config.cells[0].discover.from=pods,config.cells[0].discover.pool=llm"
    assert rights() == [["pods"]]
    assert rights("--set", follows) == [["pods"], ["inferencepools"]]
