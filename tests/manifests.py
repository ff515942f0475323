"""The files of deploy/ as data, and what Kubernetes' own schemas say of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUSTOMIZED = sorted(path.parent for path in DEPLOY.glob("kubernetes/*/kustomization.yaml"))
KUBERNETES = "1.31"
LWS = "LeaderWorkerSet"
OF_OTHERS = {LWS, "InferenceService", "RayService"}
"""Kinds of which Kubernetes has no schema. Those of docs/ were compared with their own, once, by hand."""

Thing = dict[str, Any]


def by_folder(path: Path) -> str:
    """How a test of a folder, or of a file, is called."""
    return str(path.relative_to(DEPLOY))


def things(folder: Path) -> list[Thing]:
    """All that the files of a folder describe, as they stand there."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [thing for name in names for thing in yaml.safe_load_all((folder / name).read_text())]


def validate(thing: Thing) -> None:
    """Raises for a field that Kubernetes does not know, or one that is missing or of the wrong kind."""
    if thing["kind"] in OF_OTHERS:
        for template in pod_templates(thing):
            metadata = template.get("metadata", thing["metadata"])
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        return
    kubernetes_validate.validate(thing, KUBERNETES, strict=True)


def pod_templates(thing: Thing) -> list[Thing]:
    """The pods that it makes."""
    if thing["kind"] == LWS:
        group = thing["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    if thing["kind"] == "RayService":
        return [thing["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]]
    return [thing["spec"]["template"]] if thing["kind"] == "Deployment" else []


def containers(things: list[Thing]) -> Iterator[tuple[Thing, Thing]]:
    """Each container, and the spec of its pod."""
    for thing in things:
        for template in pod_templates(thing):
            for container in template["spec"]["containers"]:
                yield container, template["spec"]


def selects(selector: Thing, labels: dict[str, str]) -> bool:
    """Whether a selector, plain or with expressions, means a pod with these labels."""
    plain = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    terms = selector.get("matchExpressions", ())
    return plain.items() <= labels.items() and all(labels[term["key"]] in term["values"] for term in terms)


def compose() -> Thing:
    """The services of compose.yaml."""
    services: Thing = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    return services
