"""Checkov's rules for Kubernetes: what the chart makes keeps them, or breaks one for a reason given here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.render import CHART, rendered
from tests.real.programs import find, python_of

pytestmark = pytest.mark.nightly

EXPLAINED = {
    "CKV_K8S_11": "no CPU limits: a gate that is throttled delays every stream; its requests are set",
    "CKV_K8S_15": "images are pulled if not present: a tag of a release never changes",
    "CKV_K8S_21": "the namespace is that of `helm install --namespace`, or of kustomization.yaml",
    "CKV_K8S_35": "tokens come from a Secret as variables, as the gate reads them; files work as well",
    "CKV_K8S_38": "a gate that discovers pods needs its service account's token; others mount none",
    "CKV_K8S_43": "the digest of an image is the operator's: `image.tag` takes TAG@sha256:DIGEST",
}
"""Rules that are broken, and why."""


def test_each_rule_is_kept_or_broken_for_a_reason(tmp_path: Path) -> None:
    helm, python = find("helm"), python_of("checkov")
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
