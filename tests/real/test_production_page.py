"""The steps of docs/production.md, as far as they can be taken without a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from deploy.render import CHART, configuration
from tests.documented import ROOT
from tests.manifests import Thing, containers, validate
from tests.real.programs import find

PAGE = (ROOT / "docs" / "production.md").read_text()
LINES = [line[4:] for line in PAGE.splitlines() if line.startswith("    ")]


def of_the_page(tmp_path: Path) -> list[Thing]:
    """What its command makes of its values."""
    [values] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "production.yaml").write_text(values)
    [install] = [line for line in LINES if line.startswith("helm install")]
    helm = install.replace("helm install", f"{find('helm')} template").replace("deploy/helm", str(CHART))
    done = subprocess.run(helm.split(), cwd=tmp_path, capture_output=True, text=True, check=True)
    return [thing for thing in yaml.safe_load_all(done.stdout) if thing]


def test_the_values_make_what_the_page_promises(tmp_path: Path) -> None:
    found = of_the_page(tmp_path)
    assert {"ServiceMonitor", "PodMonitor", "NetworkPolicy", "LeaderWorkerSet"} <= {
        each["kind"] for each in found
    }
    assert "max_in_flight: 64" in configuration(found)
    images = {container["image"] for container, _ in containers(found)}
    assert "registry.example.com/cellgate:0.1.1" in images


def test_the_values_for_a_set_that_is_there_make_gates_alone(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "with-lws.md").read_text()
    [values] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "gate.yaml").write_text(values)
    helm = [str(find("helm")), "template", "cellgate", str(CHART), "-n", "llm", "-f", "gate.yaml"]
    done = subprocess.run(helm, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = [thing for thing in yaml.safe_load_all(done.stdout) if thing]
    assert {"Deployment", "Role"} <= {each["kind"] for each in found}
    assert "LeaderWorkerSet" not in {each["kind"] for each in found}
    assert "agent_port: 9911" in configuration(found)
    for each in found:
        validate(each)


def test_the_rule_of_the_operator_has_all_alerts(tmp_path: Path) -> None:
    [rule] = [each for each in of_the_page(tmp_path) if each["kind"] == "PrometheusRule"]
    shipped = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text())
    assert (rule["kind"], rule["spec"]) == ("PrometheusRule", shipped)


def test_a_worker_is_frozen_by_its_title_and_nothing_else() -> None:
    """The loop of step 10. There are also an agent that looks for workers, and the shell itself."""
    [step] = [line for line in LINES if "kill -STOP" in line]
    loop = re.findall(r"sh -c '(.*)'$", step)[0].replace("VLLM::Worker", "TITLE::Worker")
    sleep = ["-c", "import time; time.sleep(60)"]
    worker = subprocess.Popen(["TITLE::Worker_TP1", *sleep], executable=sys.executable)
    agent = subprocess.Popen([sys.executable, *sleep, "--match=TITLE::Worker"])
    try:
        subprocess.run(["sh", "-c", loop], check=True, timeout=20)
        assert (state(worker.pid), state(agent.pid)) == ("T", "S")
    finally:
        for process in (worker, agent):
            process.kill()
            process.wait()


def state(pid: int) -> str:
    """Of a process, as proc(5) has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
