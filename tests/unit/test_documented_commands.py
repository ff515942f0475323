"""What README and docs tell to type: commands, flags, targets and files are there; what is quick is run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from cellgate.proxy.cli.commands import COMMANDS, main, parser_of
from tests.documented import PAGES, ROOT, Typed, typed
from tests.unit.capacity.test_plan import LLAMA_8B

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
    assert re.findall(r"^\| `cellgate ([a-z]+)", page, re.MULTILINE) == list(COMMANDS)
    assert len(ours()) > 30
    assert len(PAGES) > 50


@pytest.mark.parametrize("each", typed("cellgate"), ids=str)
def test_every_command_is_one(each: Typed) -> None:
    if len(each.words) > 1 and not each.words[1].startswith("-"):
        assert each.words[1] in COMMANDS, each.page


@pytest.mark.parametrize("each", ours(), ids=str)
def test_every_flag_is_taken(each: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = each.words[1:]
    if "--help" in rest:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([name, *rest])
        assert capsys.readouterr().out.startswith("usage: ")
    elif name in COMMANDS:
        parser_of(name).parse_args(rest)


@pytest.mark.parametrize("each", [one for one in ours() if one.words[1] in QUICK], ids=str)
def test_what_is_quick_does_what_it_should(
    each: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if {"--help", "-"} & set(each.words):
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


@pytest.mark.parametrize("each", typed("make"), ids=str)
def test_every_target_and_its_variables_are_in_the_makefile(each: Typed) -> None:
    if len(each.words) > 1:
        target = re.sub(r"^\.venv-.*/", ".venv-%/", each.words[1])
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), each.page
    for variable in [word.partition("=")[0] for word in each.words[2:] if "=" in word]:
        assert re.search(rf"\$\(({variable}[):]|if \$\({variable}\))", MAKEFILE), each.page


@pytest.mark.parametrize("each", typed("python"), ids=str)
def test_every_tool_is_there_and_takes_its_flags(each: Typed) -> None:
    assert each.words[1] == "-m", each.page
    path = ROOT / each.words[2].replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if each.words[2] == "pytest":
        return
    source = file.read_text()
    for flag in [word.partition("=")[0] for word in each.words[3:] if word.startswith("--")]:
        assert flag == "--help" or f'"{flag.replace("--no-", "--")}"' in source, each.page


@pytest.mark.parametrize("each", typed("pip"), ids=str)
def test_every_extra_is_one(each: Typed) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"cellgate\[([\w-]+)\]", " ".join(each.words)):
        assert extra in project["optional-dependencies"], each.page


@pytest.mark.parametrize("each", typed("kubectl"), ids=str)
def test_what_is_applied_is_there(each: Typed) -> None:
    for folder in [word for word in each.words if word.startswith("deploy/") and "-k" in each.words]:
        assert (ROOT / folder / "kustomization.yaml").is_file(), each.page
