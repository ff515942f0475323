"""Recovery and the file of keys: what may be configured, and a line for what may not."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from cellgate.proxy.config.action_settings import (
    CallWebhook,
    Remedy,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RollPolicy,
    RunCommand,
    SetImage,
)
from cellgate.proxy.config.key_file import PROBLEMS_MAX, KeyFileError, keys_in, read_keys
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.settings import SECRET_VARIABLE, Settings


def read(folder: Path, recovery: str, **environ: str) -> Settings:
    unit = "{name: a1, url: 'http://10.0.0.1:8000'}"
    path, operator = folder / "gate.yaml", folder / "operator.yaml"
    path.write_text(f"cells: [{{name: a, units: [{unit}]}}]\noperator: {operator}\n")
    item = recovery.replace("{", "{cell: a, ", 1) if recovery.startswith("{") else recovery
    operator.write_text(f"recovery: [{item}]\n")
    return load(str(path), Overrides(), environ)


def problem(folder: Path, recovery: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, recovery)
    (line,) = caught.value.problems
    return line.removeprefix(f"{folder}/operator.yaml: recovery[0]")


def test_a_command(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    found = read(tmp_path, f"{{command: [sh, -c, 'exit 0'], audit: {audit}, after_s: 5, dry_run: true}}")
    assert found.remedies == {
        "a": Remedy(str(audit), RunCommand(("sh", "-c", "exit 0")), after_s=5.0, dry_run=True)
    }
    assert not audit.exists()


def test_a_webhook_is_signed_by_its_file_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of-the-file\n")
    rest = f"webhook: 'https://ops/hook', audit: {tmp_path}/audit"
    both = read(tmp_path, f"{{{rest}, secret_file: {tmp_path}/secret}}", CELLGATE_WEBHOOK_SECRET="other")
    assert both.remedies["a"].action == CallWebhook("https://ops/hook", "of-the-file")
    other = read(tmp_path, f"{{{rest}}}", CELLGATE_WEBHOOK_SECRET="other")
    assert other.remedies["a"].action == CallWebhook("https://ops/hook", "other")
    assert "of-the-file" not in repr(both)


AUDIT = f"audit: {__file__}"
WRONG = {
    "no way to act": (
        f"{{{AUDIT}}}",
        ": expected one of command, webhook, kubernetes, ecs, systemd, found none",
    ),
    "two ways to act": (
        f"{{command: [sh], webhook: 'https://x/y', {AUDIT}}}",
        ": expected one of command, webhook, kubernetes, ecs, systemd, found command and webhook",
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
    "all pods of a namespace": (
        f"{{kubernetes: {{selector: app=llama}}, {AUDIT}}}",
        ".kubernetes.selector: expected labels with {unit} for the unit's name, "
        "such as app=llama,unit={unit}, found 'app=llama'",
    ),
    "a service that all units would share": (
        f"{{systemd: vllm, {AUDIT}}}",
        ".systemd: expected the name of a service with {unit} for the unit's name, such as vllm@{unit}, "
        "found 'vllm'",
    ),
    "tasks of no cluster": (f"{{ecs: {{}}, {AUDIT}}}", ".ecs.cluster: required key is missing"),
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
    "no mapping": ("now", ": expected a mapping, found 'now'; write {name: now, …}"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert problem(tmp_path, text) == said


def test_a_secret_beside_a_command_is_a_misunderstanding(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    line = problem(tmp_path, f"{{command: [sh], secret_file: {tmp_path}/secret, {AUDIT}}}")
    assert line == ": secret_file signs webhooks: command does not take it"


def test_pods_are_those_of_a_group_or_chosen_by_labels(tmp_path: Path) -> None:
    assert read(tmp_path, f"{{kubernetes: {{}}, {AUDIT}}}").remedies["a"].action == ReplacePods()
    keys = "{namespace: prod, selector: 'unit={unit}', evict: false}"
    found = read(tmp_path, f"{{kubernetes: {keys}, {AUDIT}}}").remedies["a"]
    assert found.action == ReplacePods("prod", "unit={unit}", evict=False)


def test_tasks_are_those_of_a_cluster_and_a_service_has_the_name_of_its_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ecs = read(tmp_path, f"{{ecs: {{cluster: prod, region: eu-west-1}}, {AUDIT}}}").remedies["a"]
    assert ecs.action == ReplaceTasks("prod", region="eu-west-1")
    (tmp_path / "systemctl").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    action = read(tmp_path, f"{{systemd: 'vllm@{{unit}}', {AUDIT}}}").remedies["a"].action
    assert isinstance(action, RestartService)
    assert action.command("a1").words[-2:] == ("--", "vllm@a1")


def roll(folder: Path, keys: str) -> RollPolicy | None:
    path, operator = folder / "gate.yaml", folder / "operator.yaml"
    cells = "cells: [{name: a, units: [{name: a1, url: 'http://10.0.0.1:8000'}]}]"
    path.write_text(f"{cells}\noperator: {operator}\n")
    operator.write_text(f"roll: {{{keys}, {AUDIT}}}\n")
    return load(str(path), Overrides(), {}).roll


def test_a_roll_has_a_way_there_and_may_have_one_back(tmp_path: Path) -> None:
    there, back = RunCommand(("sh", "-c", "new")), RunCommand(("sh", "-c", "old"))
    assert roll(tmp_path, "command: [sh, -c, new], undo: [sh, -c, old]") == RollPolicy(there, __file__, back)
    deployed = roll(tmp_path, "ecs: {cluster: prod}, undo: [sh, -c, old]")
    assert deployed == RollPolicy(ReplaceTasks("prod", deploy=True), __file__, back)
    images = roll(tmp_path, "kubernetes: {image: 'e:2', undo_image: 'e:1', namespace: prod}, parallel: 2")
    assert images == RollPolicy(SetImage("e:2", "prod"), __file__, SetImage("e:1", "prod"), parallel=2)
    assert roll(tmp_path, "kubernetes: {image: 'e:2'}") == RollPolicy(SetImage("e:2"), __file__)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("parallel: 2", "expected one of command, kubernetes, ecs, found none"),
        (
            "command: [sh], ecs: {cluster: c}",
            "expected one of command, kubernetes, ecs, found command and ecs",
        ),
        ("kubernetes: {image: e}, undo: [sh]", "undo is a command: kubernetes takes undo_image instead"),
        ("kubernetes: {}", ".kubernetes.image: required key is missing"),
    ],
)
def test_what_is_wrong_with_a_roll_is_said_in_one_line(tmp_path: Path, keys: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        roll(tmp_path, keys)
    (line,) = caught.value.problems
    assert line.endswith(said)


@pytest.mark.parametrize(
    ("operator", "more", "said"),
    [
        ("recovery: [{cell: b, command: [sh], AUDIT}]", "", "recovery[0].cell: no cell has the name 'b'"),
        (
            "recovery: [{cell: a, command: [sh], AUDIT}, {cell: a, command: [sh], AUDIT}]",
            "",
            "recovery: duplicate cell 'a'",
        ),
        ("leases: {}", "redis: 'redis://r'", "leases: with redis, gates agree there on who acts"),
        ("recover: []", "", "recover: unknown key; did you mean 'recovery'?"),
        ("- roll", "", "expected a mapping"),
    ],
)
def test_what_does_not_go_with_the_gates_file_is_said(
    tmp_path: Path, operator: str, more: str, said: str
) -> None:
    path, file = tmp_path / "gate.yaml", tmp_path / "operator.yaml"
    cells = "cells: [{name: a, units: [{name: a1, url: 'http://10.0.0.1:8000'}]}]"
    path.write_text(f"{cells}\noperator: {file}\n{more}\n")
    file.write_text(operator.replace("AUDIT", AUDIT))
    with pytest.raises(ConfigError) as caught:
        load(str(path), Overrides(), {})
    (line,) = caught.value.problems
    assert str(file) in line
    assert said in line


@pytest.mark.parametrize(
    ("keys", "place", "said"),
    [
        ("roll: {}", "roll", "operator: FILE, and there roll: {…}"),
        ("alb: {}", "alb", "operator: FILE, and there alb: {…}"),
        ("leases: {}", "leases", "operator: FILE, and there leases: {…}"),
        ("resume_s: 5", "resume_s", "a client that loses its connection sends its request again"),
        ("queue: {age_s: 5}", "queue.age_s", "is no setting any more: the gate uses 8 s"),
        ("limits: {head_bytes: 5}", "limits.head_bytes", "is no setting any more: the gate uses 65536 bytes"),
        ("headers: {session: x-a}", "headers", "session_header: NAME is what can still be chosen"),
        ("redis_username: me", "redis_username", "the environment says it, CELLGATE_REDIS_USERNAME"),
        ("rules: {passes: 3}", "rules.passes", "is no setting any more: the gate uses 2"),
        ("pool_metrics: true", "pool_metrics", "at /metrics/engine"),
    ],
)
def test_a_key_that_is_gone_names_its_successor(tmp_path: Path, keys: str, place: str, said: str) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(f"cells: [{{name: a, units: [{{name: a1, url: 'http://10.0.0.1:8000'}}]}}]\n{keys}\n")
    with pytest.raises(ConfigError) as caught:
        load(str(path), Overrides(), {})
    (line,) = caught.value.problems
    assert f" {place}: " in line
    assert said in line


def test_a_cells_recovery_is_in_the_operators_file(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("cells: [{name: a, recovery: {}, units: [{name: a1, url: 'http://10.0.0.1:8000'}]}]")
    with pytest.raises(ConfigError, match=r"cells\[0\]\.recovery: .* recovery: \[\{cell: NAME"):
        load(str(path), Overrides(), {})


# The file of keys: what it makes, and a line for each mistake, which never shows a value.

A, B = (sha256(text).hexdigest() for text in (b"a", b"b"))


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(KeyFileError) as caught:
        keys_in("keys", text.encode())
    return caught.value.problems


def test_a_key_has_what_its_tenant_says_and_its_own_goes_first() -> None:
    ring = keys_in(
        "keys",
        f"""# who may come in
{{"key": "alice", "sha256": "{A}", "tenant": "team", "limits": {{"in_flight": 2}}, "expires": "2027-01-31"}}
{{"key": "bob", "sha256": "{B}", "models": ["small"]}}

{{"tenant": "team", "models": ["large"], "priority": [5, 9], "limits": {{"tokens_per_minute": 100}}}}
{{"model": "large", "prompt": 0.5, "completion": 1.5}}
""".encode(),
    )
    alice, bob = (ring.keys[bytes.fromhex(digest)] for digest in (A, B))
    assert (alice.tenant.name, alice.models, alice.priority) == ("team", frozenset({"large"}), (5, 9))
    assert (alice.limits.in_flight, alice.tenant.limits.tokens_per_minute) == (2, 100)
    assert alice.expires_at == 1_801_353_600.0
    assert (bob.tenant.name, bob.models, bob.priority) == ("bob", frozenset({"small"}), (0, 1_000_000))
    assert ring.prices["large"].completion == 1.5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "keys:1: expected a JSON object: unexpected end of data at column 2"),
        ("[]", "keys:1: expected an object with the field key, tenant or model"),
        (
            f'{{"key": "a", "sha256": "{A}", "tenat": "t"}}',
            "keys:1: tenat: unknown field; did you mean 'tenant'?",
        ),
        ('{"key": "a"}', "keys:1: sha256: required field is missing"),
        (
            '{"key": "a", "sha256": "sk-secret"}',
            "keys:1: sha256: expected the SHA-256 of a key, 64 hexadecimal digits (see cellgate keys new)",
        ),
        (
            '{"tenant": "a b"}',
            "keys:1: tenant: expected a name of at most 128 letters, digits, '.', '_', '@' and '-'",
        ),
        (
            '{"tenant": "t", "limits": {"in_flight": -1}}',
            "keys:1: limits.in_flight: expected a whole number, 0 or more",
        ),
        (
            '{"tenant": "t", "limits": {"tokens": 1}}',
            "keys:1: limits.tokens: expected one of requests_per_minute, tokens_per_minute, in_flight, "
            "tokens_per_day, tokens_per_month, cost_per_day, cost_per_month",
        ),
        (
            '{"tenant": "t", "priority": [2, 1]}',
            "keys:1: priority: expected [LOWEST, HIGHEST], whole numbers from -1000000 to 1000000",
        ),
        ('{"tenant": "t", "models": []}', "keys:1: models: expected a list of models; leave it out for all"),
        ('{"tenant": "t", "models": {}}', "keys:1: models: expected a list of models; leave it out for all"),
        (
            f'{{"key": "a", "sha256": "{A}", "expires": "soon"}}',
            "keys:1: expires: expected a time such as 2027-01-31 or 2027-01-31T12:00:00Z",
        ),
        ('{"model": "m", "prompt": "1"}', "keys:1: prompt: expected a number, 0 or more"),
    ],
)
def test_each_mistake_is_one_line_with_its_place(line: str, problem: str) -> None:
    assert problems(line) == (problem,)


def test_duplicates_are_found_and_all_mistakes_are_told_at_once() -> None:
    text = f"""{{"key": "a", "sha256": "{A}"}}
{{"key": "b", "sha256": "{A.upper()}"}}
{{"key": "a", "sha256": "{B}"}}
{{"tenant": "t"}}
{{"tenant": "t"}}
"""
    assert problems(text) == (
        "keys:2: sha256: duplicate of key 'a'",
        "keys:3: key: duplicate key 'a'",
        "keys:5: tenant: duplicate tenant 't'",
    )


def test_of_many_mistakes_the_first_are_shown() -> None:
    told = problems("[]\n" * (PROBLEMS_MAX + 3))
    assert (len(told), told[-1]) == (PROBLEMS_MAX + 1, "and 3 more")


def test_no_mistake_shows_a_key(tmp_path: Path) -> None:
    secret = "sk-very-secret"
    told = problems(
        f'{{"key": "{secret} ", "sha256": "{secret}", "expires": "{secret}", "limits": "{secret}"}}'
    )
    assert len(told) == 4
    assert secret not in "".join(told)
    with pytest.raises(KeyFileError, match="expected a readable file"):
        read_keys(str(tmp_path / "nowhere"))
