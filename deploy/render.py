"""`python -m deploy.render`: what is made of the chart: deploy/kubernetes, and the schema of its values; and
what the chart has a copy of: alerts and dashboard.

For those who use kubectl and Kustomize, each folder of deploy/kubernetes has an example of the chart as
`manifests.yaml`, and the gate's configuration beside it: kustomization.yaml makes the ConfigMap of that, so
that another configuration is another rollout.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from cellgate.proxy.config.schema import json_schema

DEPLOY = Path(__file__).resolve().parent
HELM = DEPLOY.parent / ".venv-helm" / "helm"
CHART = DEPLOY / "helm"
SHIPPED = ("rules.yaml", "dashboard.json")
"""Of deploy/monitoring, which the chart has as well: Helm reads no file beside its chart."""
RELEASES = {"cell": "cellgate", "sidecar": "cellgate", "fleet-router": "cellgate-router"}
"""The folders of deploy/kubernetes, and what their release is called."""

_HEAD = "# Made by deploy/render.py of deploy/helm and deploy/helm/examples/{0}.yaml: change those.\n"
_FREE = {
    "affinity",
    "annotations",
    "config",
    "labels",
    "podLabels",
    "nodeSelector",
    "operator",
    "podAnnotations",
    "resources",
}
"""Values with keys of others: of the gate's configuration, of Kubernetes."""


def rendered(helm: str, example: str, release: str = "cellgate", *flags: str) -> str:
    """What the chart makes of an example's values. Raises CalledProcessError with what Helm says."""
    values = CHART / "examples" / f"{example}.yaml"
    command = [helm, "template", release, str(CHART), "-f", str(values), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def files(text: str, example: str) -> dict[str, str]:
    """The files of a folder of deploy/kubernetes, by name."""
    head, documents = _HEAD.format(example), text.split("\n---\n")
    others = [document for document in documents if "\nkind: ConfigMap\n" not in document]
    made = configuration(list(yaml.safe_load_all(text)))
    return {"manifests.yaml": head + "\n---\n".join(others), "cellgate.yaml": head + made}


def configuration(things: list[dict[str, Any]]) -> str:
    """The gate's configuration among what was rendered."""
    maps = [thing["data"] for thing in things if thing["kind"] == "ConfigMap"]
    [found] = [data["cellgate.yaml"] for data in maps if "cellgate.yaml" in data]
    return str(found)


def values_schema(values: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of values like these: Helm refuses a key that is not there, instead of ignoring it."""
    schema = _schema(values)
    schema["properties"]["config"] = _configuration_schema()
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _configuration_schema() -> dict[str, Any]:
    """That of the gate's keys: a typo under `config` is found by Helm. The mode makes what is required."""
    schema = json_schema()
    for key in ("$schema", "title", "required"):
        schema.pop(key, None)
    return schema


def _schema(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case list():
            return {"type": "array"}
        case dict():
            inner = {
                key: {"type": "object"} if key in _FREE else _schema(each) for key, each in value.items()
            }
            # What charts around this one may give to each of theirs.
            return {"type": "object", "properties": {"global": {"type": "object"}, **inner}} | _CLOSED
    return {"type": "string"}


_CLOSED = {"additionalProperties": False}


def main() -> int:
    """Write all files; 1 when there is no Helm."""
    if not HELM.exists():
        print("Helm is not installed; type:  make .venv-helm/made", file=sys.stderr)
        return 1
    schema = values_schema(yaml.safe_load((CHART / "values.yaml").read_text()))
    (CHART / "values.schema.json").write_text(json.dumps(schema, indent=1) + "\n")
    for name in SHIPPED:
        (CHART / "files" / name).write_text((DEPLOY / "monitoring" / name).read_text())
    for example, release in RELEASES.items():
        for name, text in files(rendered(str(HELM), example, release), example).items():
            (DEPLOY / "kubernetes" / example / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
