"""What a forge, a registry and a contributor read: workflows, templates, metadata, the release."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cellgate import VERSION
from deploy.first_start import FirstStartError
from deploy.release import ReleaseError, notes, started, version, with_links, with_runbooks, with_urls
from tests.documented import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
MAKE = r"^make (?:PYTHON=python )?([a-z-]+)"
SOURCE = "https://forge.example/us/cellgate"


def read(path: Path) -> dict[str, Any]:
    """A file of YAML. A bare `on` is true to YAML 1.1; forges read it as a word."""
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in found.items()}


def commands(workflow: dict[str, Any]) -> list[str]:
    """What its steps run."""
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_with_the_least_rights(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert {"on", "jobs", "name"} <= workflow.keys()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(MAKE, "\n".join(commands(workflow)), re.MULTILINE):
        assert target in targets
    for job in workflow["jobs"].values():
        for need in [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", []):
            assert need in workflow["jobs"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert all(re.search(r"@(v\d+|release/v1)$", step["uses"]) for step in job["steps"] if "uses" in step)


def test_each_python_that_the_package_names_is_tested_by_what_ci_runs() -> None:
    workflow = read(GITHUB / "workflows" / "test.yml")
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert matrix == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={matrix[0]}"
    assert "bash .ci/run" in commands(workflow)


def test_links_of_the_pages_for_contributors_lead_somewhere_and_templates_are_forms() -> None:
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        links = re.findall(r"\]\(([^)#]+)", (GITHUB / name).read_text())
        assert [link for link in links if not (GITHUB / link).exists()] == []
    for name in ("bug", "feature"):
        form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"] if "id" in field]
        assert len(ids) == len(set(ids)) > 0


def test_commits_are_checked_as_make_check_does() -> None:
    [repository] = read(GITHUB / "pre-commit.yaml")["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for tool in ("ruff format", "ruff check", "mypy", "tests/unit/test_imports.py tests/unit/test_house.py"):
        assert any(tool in entry for entry in entries)
        assert tool in makefile


# The release.


def test_a_release_takes_the_notes_of_its_version() -> None:
    changelog = (
        "# Changelog\n\n## 1.1.0 - 2026-02-01\n\n### Added\n- This.\n\n## 1.0.0 - 2026-01-01\n- That.\n"
    )
    assert notes(changelog, "1.1.0") == "### Added\n- This.\n"
    assert notes(changelog, "1.0.0") == "- That.\n"
    with pytest.raises(ReleaseError, match=r"no section '## 2.0.0 - DATE'"):
        notes(changelog, "2.0.0")
    with pytest.raises(ReleaseError, match="give the section its date"):
        notes("## 1.0.0 - unreleased\n\n- That.\n", "1.0.0")


def test_a_tag_and_the_changelog_name_the_version() -> None:
    assert version(f"v{VERSION}") == VERSION
    assert re.findall(r"^## (\S+) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION
    with pytest.raises(ReleaseError, match=f"the tag is v9.9.9, but cellgate.VERSION is {VERSION}"):
        version("v9.9.9")


def test_a_version_whose_wheel_does_not_start_is_no_release() -> None:
    def fails() -> None:
        raise FirstStartError("the wheel did not work: ModuleNotFoundError: jwt")

    with pytest.raises(ReleaseError, match=r"does not start where it is new: .*jwt"):
        started(fails)
    started(lambda: None)


def test_a_release_says_where_its_repository_is() -> None:
    project = with_urls((ROOT / "pyproject.toml").read_text(), SOURCE, "v1.0.0")
    urls = tomllib.loads(project)["project"]["urls"]
    assert urls["Source"] == SOURCE
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    assert tomllib.loads(project)["project"]["optional-dependencies"] == PROJECT["optional-dependencies"]
    readme = with_links((ROOT / "README.md").read_text(), SOURCE, "v1.0.0")
    assert f"({SOURCE}/blob/v1.0.0/docs/agent.md)" in readme
    assert f"({SOURCE}/raw/v1.0.0/docs/images/status-page.png)" in readme
    assert not re.search(r"\]\((?!https://)", readme)
    rules = with_runbooks((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text(), SOURCE, "v1.0.0")
    assert f"runbook_url: {SOURCE}/blob/v1.0.0/docs/runbooks/unit-down.md" in rules
    assert "cellgate.example" not in re.sub(r"^#.*", "", rules, flags=re.MULTILINE)


def test_a_wrong_tag_is_one_line(tmp_path: Path) -> None:
    command = f"-m deploy.release v9.9.9 --source {SOURCE} --notes {tmp_path}/notes".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


# The bill of materials of the image.


def test_the_bill_of_materials_has_what_is_installed() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "image" / "sbom.py")]
    bill = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "cellgate"
    found = {component["name"]: component["purl"] for component in bill["components"]}
    assert re.fullmatch(r"pkg:pypi/pyyaml@[\d.]+", found["pyyaml"])
    assert {re.split(r"[\[>=]", name)[0].lower() for name in PROJECT["dependencies"]} <= found.keys()
