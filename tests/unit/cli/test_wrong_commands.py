"""A wrong command is one line on stderr that says what to do, and exit code 2; what did not work is 1."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cellgate.proxy.cli.main import main

NO_GATE = "no gate answers at 127.0.0.1:1 (Connection refused): is it running? Set its admin address"
WRONG: list[tuple[str, int, str]] = [
    ("fly", 2, "cellgate: there is no command 'fly'; see: cellgate --help"),
    ("unit", 2, "cellgate: there is no command 'unit'; did you mean units?; see: cellgate --help"),
    ("serv", 2, "cellgate: there is no command 'serv'; did you mean serve?"),
    ("undrian a1", 2, "cellgate: there is no command 'undrian'; did you mean undrain?"),
    ("a1 drain", 2, "cellgate: there is no command 'a1'"),
    ("--verison", 2, "cellgate: unrecognized arguments: --verison; did you mean --version?"),
    ("units --wath", 2, "cellgate units: unrecognized arguments: --wath; did you mean --watch?"),
    ("units --jsn", 2, "cellgate units: unrecognized arguments: --jsn; did you mean --json?"),
    ("help unit", 2, "cellgate help: argument COMMAND: invalid choice: 'unit' (choose from "),
    ("version 1", 2, "cellgate version: unrecognized arguments: 1; see: cellgate version --help"),
    ("completion units", 1, "cellgate: no gate answers at 127.0.0.1:1 (Connection refused)"),
    ("units a1", 2, "cellgate units: unrecognized arguments: a1; see: cellgate units --help"),
    ("units -o yaml", 2, "cellgate units: argument -o/--output: invalid choice: 'yaml' (choose from "),
    ("units -o jsn", 2, "cellgate units: argument -o/--output: invalid choice: 'jsn' (choose from "),
    ("units -o", 2, "cellgate units: argument -o/--output: expected one argument; see: cellgate units"),
    ("units --admin here", 2, "cellgate units: argument --admin: expected HOST:PORT, with an IPv6 host in"),
    ("units --admin", 2, "cellgate units: argument --admin: expected one argument"),
    ("units --adm 127.0.0.1:1", 2, "cellgate units: unrecognized arguments: --adm 127.0.0.1:1; did you mean"),
    ("units --admin 127.0.0.1:1", 1, f"cellgate: {NO_GATE}"),
    ("events -f --admin 127.0.0.1:1", 1, f"cellgate: {NO_GATE}"),
    ("top --admin 127.0.0.1:1", 1, f"cellgate: {NO_GATE}"),
    ("events --folow", 2, "cellgate events: unrecognized arguments: --folow; did you mean --follow?"),
    ("why", 2, "cellgate why: the following arguments are required: UNIT; see: cellgate why --help"),
    ("why a1 a2 a3", 2, "cellgate why: unrecognized arguments: a3; see: cellgate why --help"),
    (
        "drain",
        2,
        "cellgate drain: one of the arguments UNIT --cell --least-valued is required; see: cellgate drain",
    ),
    ("drain a1 --cell a", 2, "cellgate drain: argument --cell: not allowed with argument UNIT"),
    ("drain --cells a", 2, "cellgate drain: unrecognized arguments: --cells; did you mean --cell?"),
    ("engine pause a1 --mod keep", 2, "cellgate engine: unrecognized arguments: --mod keep; did you"),
    ("engine resume a1 --mode keep", 2, "cellgate engine: unrecognized arguments: --mode keep"),
    (
        "explain --tokens 9",
        2,
        "cellgate explain: unrecognized arguments: --tokens 9; did you mean --prompt-tok",
    ),
    ("poison clean", 2, "cellgate poison: argument action: invalid choice: 'clean' (choose from "),
    ("completion", 2, "cellgate completion: the following arguments are required: shell"),
    ("completion bsh", 2, "cellgate completion: argument shell: invalid choice: 'bsh' (choose from "),
    ("schema x", 2, "cellgate schema: unrecognized arguments: x; see: cellgate schema --help"),
    ("serve --unti http://x", 2, "cellgate serve: unrecognized arguments: --unti; did you mean --unit?"),
    (
        "serve gate.yaml -c other.yaml",
        2,
        "cellgate serve: argument -c/--config: not allowed with argument FILE",
    ),
    ("serve nowhere.yaml", 2, "nowhere.yaml: expected a readable file: No such file or directory"),
    ("serve --config nowhere.yaml", 2, "nowhere.yaml: expected a readable file: No such file or directory"),
    ("serve -c nowhere.yaml", 2, "nowhere.yaml: expected a readable file: No such file or directory"),
    ("serve", 2, "--unit: expected at least one cell with a unit, found none; add units to the file"),
    ("check nowhere.yaml", 2, "nowhere.yaml: expected a readable file: No such file or directory"),
    (
        "check nowhere.yaml -c other.yaml",
        2,
        "cellgate check: argument -c/--config: not allowed with argument FILE",
    ),
    (
        "check --unit x",
        2,
        "--unit: expected http://HOST:PORT or https://HOST:PORT without a path, found 'x'; did",
    ),
    ("check --unit http://x --workers two", 2, "--workers: expected a whole number from 1, found 'two'"),
    (
        "check --unit http://x --listen 8000",
        2,
        "--listen: expected HOST:PORT, with an IPv6 host in brackets, ",
    ),
    ("check --unit http://x --policy best", 2, "--policy: expected a policy: least_load, p2c, "),
    ("check --unit http://x --admin 127.0.0.1:8000", 2, "--admin: 127.0.0.1:8000 is taken by listen (127."),
    ("plan m", 2, "cellgate plan: the following arguments are required: --memory; see: cellgate plan --help"),
    (
        "plan m --memory big",
        2,
        "cellgate plan: argument --memory: expected a size such as 80GiB, found 'big'",
    ),
    ("plan org/unknown-model --memory 80GiB", 2, "org/unknown-model: neither a file nor in the hub cache "),
    ("agent", 2, "cellgate agent: nothing to watch: give --match, --pid-file or --port"),
    ("agent --match (", 2, "cellgate agent: argument --match: '(' is not a valid regular expression: "),
    (
        "agent --port 99999",
        2,
        "cellgate agent: argument --port: expected a port from 1 to 65535, found '99999'",
    ),
    (
        "agent --port 1 --listen 0.0.0.0:1",
        2,
        "cellgate agent: 0.0.0.0 can be reached from other machines, so ",
    ),
]


@pytest.mark.parametrize(("command", "code", "line"), WRONG, ids=[command for command, _, _ in WRONG])
def test_it_is_one_line_that_says_what_to_do(
    command: str, code: int, line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    monkeypatch.delenv("CELLGATE_AGENT_TOKEN", raising=False)
    monkeypatch.setenv("CELLGATE_ADMIN", "127.0.0.1:1")
    assert code_of(command.split()) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def code_of(words: Sequence[str]) -> int:
    """The exit code, however it comes."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else -1
