"""What README and docs tell to type: commands, flags, targets and files are there; what is quick is run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from cellgate.extras import taken_out
from cellgate.proxy.cli.main import COMMANDS, main, parser_of
from loadtests.__main__ import tools
from tests.documented import PAGES, ROOT, Typed, typed

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
QUICK = ("check", "schema", "completion", "plan")
MAKEFILE = (ROOT / "Makefile").read_text()


def ours() -> list[Typed]:
    """Those of `cellgate` that are whole."""
    return [each for each in typed("cellgate") if len(each.words) > 1 and not is_mention(each)]


def is_mention(each: Typed) -> bool:
    """Whether a sentence just names the command."""
    return each.inline and len(each.words) == 2 and not each.words[1].startswith("-")


def test_the_pages_tell_of_all_commands() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    told = re.findall(r"^\| `cellgate ([a-z]+)", page, re.MULTILINE)
    assert [name for name in told if name in COMMANDS or not taken_out()] == list(COMMANDS)
    assert len(ours()) > 30
    assert len(PAGES) > 50


def test_every_command_and_flag_is_one() -> None:
    unknown = [each for each in typed("cellgate") if each.words[1:] and each.words[1][0] != "-"]
    assert [f"{each.page}: {each}" for each in unknown if each.words[1] not in COMMANDS] == [] or taken_out()
    assert [f"{each.page}: {each}" for each in ours() if not is_taken(each)] == []


def is_taken(each: Typed) -> bool:
    """Whether its command takes all its flags, or shows its help."""
    name, *rest = each.words[1:]
    if name not in COMMANDS:
        return True
    try:
        main([name, *rest]) if "--help" in rest else parser_of(name).parse_args(rest)
    except SystemExit as end:
        return "--help" in rest and end.code == 0
    return "--help" not in rest


@pytest.mark.parametrize(
    "each", [one for one in ours() if one.words[1] in QUICK and one.words[1] in COMMANDS], ids=str
)
def test_what_is_quick_does_what_it_should(
    each: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A configuration is no list of nodes: tests/unit/extras/planner has some.
    if {"--help", "-", "--nodes", *(f"--{name}" for name in taken_out())} & set(each.words):
        return
    [example] = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "cellgate.yaml").write_text(example)
    snapshot = tmp_path / "models--ORG--MODEL" / "snapshots" / "main"
    for folder in (snapshot, tmp_path / "Llama-3.3-70B"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(each.words[1:]) == 0, capsys.readouterr().err


def test_every_target_and_its_variables_are_in_the_makefile() -> None:
    found = []
    for each in typed("make"):
        if len(each.words) > 1:
            target = re.sub(r"^\.venv-.*/", ".venv-%/", each.words[1])
            if not re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE):
                found.append(f"{each.page}: {each}")
        for variable in [word.partition("=")[0] for word in each.words[2:] if "=" in word]:
            if not re.search(rf"\$\(({variable}[):]|if \$\({variable}\))", MAKEFILE):
                found.append(f"{each.page}: {each}, {variable}")
    assert found == []


def test_every_tool_is_there_and_takes_its_flags() -> None:
    assert [f"{each.page}: {each}" for each in typed("python") if not is_tool(each)] == []


def test_every_tool_that_a_page_names_is_in_their_list() -> None:
    listed = {module for module, _ in tools()} | {"loadtests.simunit", "loadtests.kit.mock_fleet"}
    named = {
        (page.name, module)
        for page in PAGES
        for module in re.findall(r"`(?:python -m )?(loadtests\.[a-z_.]+[a-z_])[ `]", page.read_text())
    }
    assert [each for each in named if each[1] not in listed] == []
    assert len(named) > 40


def is_tool(each: Typed) -> bool:
    """Whether it is a module of ours, or pytest, whose source has its flags."""
    if each.words[1] != "-m":
        return False
    if each.words[2] == "pytest":
        return True
    path = ROOT / each.words[2].replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    flags = [word.partition("=")[0] for word in each.words[3:] if word.startswith("--")]
    source = file.read_text() if file.exists() else ""
    return bool(source) and all(
        flag == "--help" or f'"{flag.replace("--no-", "--")}"' in source for flag in flags
    )


def test_every_extra_is_one_and_what_is_applied_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [(each, name) for each in typed("pip") for name in re.findall(r"cellgate\[([\w-]+)\]", str(each))]
    assert [f"{each.page}: {each}" for each, name in named if name not in extras] == []
    for each in typed("kubectl"):
        folders = [word for word in each.words if word.startswith("deploy/") and "-k" in each.words]
        assert all((ROOT / folder / "kustomization.yaml").is_file() for folder in folders), each
