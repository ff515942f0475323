"""What may be configured about recovery, and what is said of what may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.recovery import SECRET_VARIABLE
from cellgate.proxy.config.remedy import Remedy
from cellgate.proxy.config.settings import Settings


def read(folder: Path, recovery: str, **environ: str) -> Settings:
    unit = "{name: a1, url: 'http://10.0.0.1:8000'}"
    path = folder / "gate.yaml"
    path.write_text(f"cells: [{{name: a, recovery: {recovery}, units: [{unit}]}}]\n")
    return load(str(path), Overrides(), environ)


def problem(folder: Path, recovery: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, recovery)
    (line,) = caught.value.problems
    return line.removeprefix(f"{folder}/gate.yaml: cells[0].recovery")


def test_a_command(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    found = read(tmp_path, f"{{command: [sh, -c, 'exit 0'], audit: {audit}, after_s: 5, dry_run: true}}")
    assert found.remedies == {"a": Remedy(str(audit), ("sh", "-c", "exit 0"), after_s=5.0, dry_run=True)}
    assert not audit.exists()


def test_a_webhook_is_signed_by_its_file_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of-the-file\n")
    rest = f"webhook: 'https://ops/hook', audit: {tmp_path}/audit"
    both = read(tmp_path, f"{{{rest}, secret_file: {tmp_path}/secret}}", CELLGATE_WEBHOOK_SECRET="other")
    assert both.remedies["a"].secret == "of-the-file"
    assert read(tmp_path, f"{{{rest}}}", CELLGATE_WEBHOOK_SECRET="other").remedies["a"].secret == "other"
    assert "of-the-file" not in repr(both)


AUDIT = f"audit: {__file__}"
WRONG = {
    "no way to act": (f"{{{AUDIT}}}", ": expected either command or webhook, found neither"),
    "two ways to act": (
        f"{{command: [sh], webhook: 'https://x/y', {AUDIT}}}",
        ": expected either command or webhook, found both",
    ),
    "no audit log": ("{command: [sh]}", ".audit: required key is missing"),
    "an audit log nowhere": (
        "{command: [sh], audit: /no/where}",
        ".audit: expected a writable file in an existing directory, found '/no/where'",
    ),
    "a line of shell": (
        f"{{command: 'kubectl delete', {AUDIT}}}",
        ".command: expected a command as a list of words, such as [/usr/local/bin/recover, --now], "
        "found 'kubectl delete'; did you mean [kubectl, delete]? There is no shell",
    ),
    "a number in a command": (
        f"{{command: [sh, 5], {AUDIT}}}",
        ".command: expected a command as a list of words, such as [/usr/local/bin/recover, --now], "
        "found a list; put each word that is not a string in quotes",
    ),
    "no such program": (
        f"{{command: [/no/such, x], {AUDIT}}}",
        ".command: expected an executable program, found '/no/such'",
    ),
    "a webhook in the clear": (
        f"{{webhook: 'http://ops/hook', {AUDIT}}}",
        ".webhook: expected https://HOST/PATH, or http:// on this machine, found 'http://ops/hook'; "
        "did you mean 'https://ops/hook'?",
    ),
    "a webhook that anyone could call": (
        f"{{webhook: 'https://ops/hook', {AUDIT}}}",
        f": webhook requires secret_file, or the variable {SECRET_VARIABLE}",
    ),
    "a secret for a command": (
        f"{{command: [sh], secret_file: /dev/zero, {AUDIT}}}".replace("/dev/zero", __file__),
        ".secret_file: expected a token of visible ASCII characters, found other characters",
    ),
    "a near miss": (
        f"{{command: [sh], afters: 5, {AUDIT}}}",
        ".afters: unknown key; did you mean 'after_s'?",
    ),
    "no attempt": (
        f"{{command: [sh], attempts: 0, {AUDIT}}}",
        ".attempts: expected a whole number from 1, found 0",
    ),
    "a share of 3": (
        f"{{command: [sh], max_share: 3, {AUDIT}}}",
        ".max_share: expected a share from 0 to 1, found 3",
    ),
    "no mapping": ("now", ": expected a mapping, found 'now'"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert problem(tmp_path, text) == said


def test_a_secret_beside_a_command_is_a_misunderstanding(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    line = problem(tmp_path, f"{{command: [sh], secret_file: {tmp_path}/secret, {AUDIT}}}")
    assert line == ": secret_file signs webhooks: a command does not take it"
