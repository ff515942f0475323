"""The commands that README and docs tell to type."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("cellgate", "make", "python", "curl", "kubectl", "docker", "pip", "helm")
PLACES = {
    "COMMAND": "units",
    "NAME": "a1",
    "UNIT": "a1",
    "FILE": "cellgate.yaml",
    "MODEL": "ORG/MODEL",
    "SIZE": "80GiB",
    "PATTERN": "VLLM::Worker",
    "FINGERPRINT": "5f2c8a0d91e4b37a",
    "MODE": "wait",
    "N": "1",
}
"""What stands for something in the pages, and something that it may stand for."""

_NO_COMMANDS = ("cellgate least_load", "cellgate told", "cellgate weighed")
"""Routers in the tables of docs/replay.md."""


class Typed(NamedTuple):
    """A command: the page it is on, its words, and whether it stands within a sentence, perhaps not whole."""

    page: str
    words: tuple[str, ...]
    inline: bool

    def __str__(self) -> str:
        return shlex.join(self.words)


def typed(program: str) -> list[Typed]:
    """All commands of a program, each once, without the folder of the program."""
    found: dict[tuple[tuple[str, ...], bool], Typed] = {}
    for each in [each for page in PAGES for each in _of_page(page)]:
        if each.words[0] == program:
            found.setdefault((each.words, each.inline), each)
    return list(found.values())


@cache
def _of_page(page: Path) -> list[Typed]:
    name, text = str(page.relative_to(ROOT)), page.read_text()
    blocks = "".join(re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    indented = "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("    "))
    lines = (blocks + indented).replace("\\\n", " ").splitlines()
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    found = [Typed(name, words, inline=False) for line in lines for words in _commands(line)]
    return found + [Typed(name, words, inline=True) for each in code for words in _commands(each)]


def _commands(line: str) -> list[tuple[str, ...]]:
    """The commands of a line: what explains them, stands beside them or takes their output is left out."""
    if line in _NO_COMMANDS:
        return []
    line = re.sub(r"^\$ |^source <\(|\.venv/bin/", "", line)
    line = re.sub(r"\[([^]|]+)(\|[^]]*)?\]", r"\1", line) if line.startswith("cellgate") else line
    parts = re.split(r" {2,}(?=[\w#(])| / (?=cellgate)|\)? +#|\)$| > ", line)
    return [words for part in parts if (words := _words(part)) and words[0] in PROGRAMS]


def _words(part: str) -> tuple[str, ...]:
    try:
        words = shlex.split(part)
    except ValueError:
        return ()
    if words[:3] == ["python", "-m", "cellgate"]:
        words[:3] = ["cellgate"]
    return tuple(PLACES.get(word, word) for word in words)
