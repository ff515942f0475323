"""Why a command did not work.

In this order: `CommandError`, `CommandParser`, `add_settings`, `fleet_table`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.settings import Address, LogFormat, Settings
from cellgate.proxy.observe.text import duration
from cellgate.router.nouns import Fleet

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class CommandError(Exception):
    """A command did not work. `str()` is one line that says what to do."""


WRONG = 2
"""The exit code of a wrong command, and of a wrong configuration."""


class CommandParser(argparse.ArgumentParser):
    """Takes flags by whole names alone; exits with `WRONG` and one line of what is wrong and what to do."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """As argparse does, which passes over an output that cannot be written."""
        if message and file in (None, sys.stdout):
            print(message, end="")
        else:
            super()._print_message(message, file)

    def format_help(self) -> str:
        """With pages where the reader has them."""
        return re.sub(r" \(docs/(\S+\.md)\)", lambda found: _page(found[1]), super().format_help())

    def error(self, message: str) -> NoReturn:
        """The line: what is wrong, what was probably meant, and where to read on."""
        flags = [flag for action in actions_of(self) for flag in action.option_strings]
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        hint = near(unknown[1], flags) if unknown else ""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        hint = near(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else hint
        self.exit(WRONG, f"{self.prog}: {' '.join(message.split())}{hint}; see: {self.prog} --help\n")


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Its arguments, and those of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions_of(below)


def page_file(name: str) -> Path | None:
    """Where a page of the documentation is: in the checkout, or beside an installed package."""
    for folder in (Path(__file__).parents[3] / "docs", Path(sys.prefix) / "share/cellgate/docs"):
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9/-]*", name) and (folder / f"{name}.md").is_file():
            return folder / f"{name}.md"
    return None


def with_pages(text: str) -> str:
    """The text, in which pages are named so that they can be read here: `cellgate help redis`."""
    if (Path(__file__).parents[3] / "docs").is_dir():
        return text
    return re.sub(r"\bdocs/([a-z0-9/-]+)\.md(#[\w-]+)?", r"cellgate help \1", text)


def _page(name: str) -> str:
    topic = name.removesuffix(".md")
    if (file := page_file(topic)) is not None:
        return f" (cellgate help {topic})" if "share" in file.parts[-4:] else f" (docs/{name})"
    from importlib import metadata  # Late: for helps alone.

    urls = metadata.metadata("cellgate").get_all("Project-URL") or ()
    sites = [url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")]
    return f" ({sites[0]}/{name})" if sites else ""


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, where one of those known is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


# Flags that several commands have: those that make settings, and where the gate's admin port is.


ADMIN = Settings(fleet=Fleet()).admin
ADMIN_VARIABLE = "CELLGATE_ADMIN"
"""The admin port that commands ask without `--admin`."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags that make settings; without one, the file decides, and without a file the default."""
    from cellgate.policies import POLICIES  # Late: commands that talk to a gate do not need them.

    add = parser.add_argument
    add("--workers", metavar="N", type=_number, help="the number of processes that serve clients")
    add("--listen", metavar="HOST:PORT", help="the address for requests")
    add("--admin", metavar="HOST:PORT", help="the address of the admin port")
    help_text = "a unit; can be repeated; replaces the cells of the file"
    add("--unit", metavar="[NAME=]URL", action="append", default=[], help=help_text)
    add("--policy", metavar="POLICY", help="how units are ranked: " + ", ".join(POLICIES))
    add("--redis", metavar="URL", help="the Redis that gates share (docs/redis.md)")
    add("--access-log", metavar="FORMAT", help="one of " + ", ".join(get_args(LogFormat)))


def add_file(parser: argparse.ArgumentParser, help_text: str) -> None:
    """The configuration: `args.file`, or `args.config`."""
    file = parser.add_mutually_exclusive_group()
    file.add_argument("file", metavar="FILE", nargs="?", help=help_text)
    file.add_argument("-c", "--config", dest="config", metavar="FILE", help="the same")


def overrides(args: argparse.Namespace) -> Overrides:
    """What these flags say."""
    return Overrides(
        args.listen,
        args.admin,
        tuple(args.unit),
        args.policy,
        args.access_log,
        redis=args.redis,
        workers=args.workers,
        on_terminal=sys.stdout.isatty(),
    )


def add_admin(parser: argparse.ArgumentParser) -> None:
    help_text = f"the admin port of the gate; default: {ADMIN_VARIABLE}, or {ADMIN}"
    default = os.environ.get(ADMIN_VARIABLE) or ADMIN
    parser.add_argument("--admin", metavar="HOST:PORT", type=_address, default=default, help=help_text)


def admin_address() -> Address:
    """The gate that commands ask without `--admin`. Raises CommandError."""
    try:
        return _address(os.environ.get(ADMIN_VARIABLE) or str(ADMIN))
    except argparse.ArgumentTypeError as error:
        raise CommandError(str(error)) from None


def add_unit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="UNIT", help="the name of the unit")


def _number(text: str) -> int | str:
    """A number where it is one; what is wrong with anything else is said as of the file."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _address(text: str) -> Address:
    from cellgate.proxy.config.checks import (
        InvalidValueError,
        address,  # Late, as above.
    )

    try:
        return address(text)
    except InvalidValueError as error:
        where = f" in {ADMIN_VARIABLE}" if text == os.environ.get(ADMIN_VARIABLE) else ""
        raise argparse.ArgumentTypeError(f"expected {error.expected}, found {text!r}{where}") from None


# Tables of text that commands print, from the configuration or from the admin port.


_TERMS = {
    "TOTAL": "total_s",
    "QUEUE": "queue_s",
    "PREFILL": "prefill_s",
    "DECODE": "decode_s",
    "BESIDE": "slowdown_of_others_s",
}
"""Columns, with what /explain calls their values; OTHER adds the rest."""


def fleet_table(fleet: Fleet) -> str:
    """The units as configured, one a line."""
    head = ("UNIT", "CELL", "URL", "WEIGHT", "MAX IN FLIGHT", "MODELS", "NODES")
    rows = (
        (
            unit.name,
            unit.cell,
            unit.url,
            f"{unit.weight:g}, cell {fleet.cell(unit.cell).weight:g}",
            str(unit.max_in_flight),
            ", ".join(unit.models) or "asked of the unit",
            ", ".join(f"{node.name} ({node.role.value})" for node in unit.nodes),
        )
        for unit in fleet.units
    )
    return table([head, *rows])


def units_table(units: Sequence[Mapping[str, Any]], *, wide: bool = False) -> str:
    """The units of a running gate (`GET /units`), one a line."""
    return table(unit_rows(units, wide=wide))


def unit_rows(units: Sequence[Mapping[str, Any]], *, wide: bool = False) -> list[list[str]]:
    """The head, and a row for each; `wide`: with all that helps to compare units."""
    head = ["UNIT", "CELL", "VERDICT", "FOR", "IN FLIGHT", "RUNNING/WAITING"]
    more = ["ROLE", "WEIGHT", "KV", "PREFILL", "QUEUED", "ENGINE", "MODELS", "URL"] if wide else []
    return [
        [*head, *more, "REASON"],
        *([*_unit_row(unit), *(_wide_row(unit) if wide else ()), str(unit["reason"])] for unit in units),
    ]


def _unit_row(unit: Mapping[str, Any]) -> list[str]:
    return [
        str(unit["name"]),
        str(unit["cell"]),
        verdict(unit),
        duration(unit["standing_s"]),
        f"{unit['in_flight']} of {unit['max_in_flight']}",
        f"{load['running']}/{load['waiting']}{aged(load['age_s'])}" if (load := unit["load"]) else "-",
    ]


OLD_S = 5.0
"""What an engine said of itself is shown with its age from then on."""


def aged(age_s: float) -> str:
    """How old a figure is, where that matters."""
    return f" ({duration(age_s)} old)" if age_s >= OLD_S else ""


def _wide_row(unit: Mapping[str, Any]) -> list[str]:
    load, routing = unit["load"] or {}, unit["routing"]
    return [
        str(unit["role"]),
        f"{unit['weight']:g}",
        "-" if load.get("kv_use") is None else f"{load['kv_use']:.0%}",
        f"{routing['prefill_tokens_s']:,.0f} tokens/s" if routing["prefill_samples"] else "-",
        f"{routing['queued_tokens']:,} tokens",
        str(unit["build"]["version"] or "-"),
        ", ".join(unit["models"]) or "-",
        str(unit["url"]),
    ]


def explain_text(found: Mapping[str, Any]) -> str:
    """Where a request would go (`GET /explain`): the outcome in a line, units in their rank, and notes."""
    head = ("UNIT", "CELL", *_TERMS, "OTHER", "IN FLIGHT", "NOTE")
    shown_terms = frozenset(_TERMS.values())
    rows = (
        (
            str(unit["unit"]),
            str(unit["cell"]),
            *(_seconds(unit["cost"][name]) for name in _TERMS.values()),
            _seconds(sum(value or 0.0 for name, value in unit["cost"].items() if name not in shown_terms)),
            f"{unit['in_flight']} of {unit['places']}",
            _note(unit),
        )
        for unit in found["units"]
    )
    wait = f" for about {_seconds(found['wait_s'])}" if found.get("wait_s") is not None else ""
    outcome = f"{found['decision']}{wait}: {found['reason']} (policy {found['policy']})"
    legend = _COLUMNS if found["units"] else ()
    return "\n".join([shown(outcome), "", table([head, *rows]), *map(shown, found["notes"]), *legend])


_COLUMNS = (
    "",
    "Seconds that follow if it goes there. TOTAL: all, its own and those of requests beside it.",
    "QUEUE: until its turn. PREFILL: for what is not cached of its prompt. DECODE: for its answer.",
    "BESIDE: what it costs those beside it. OTHER: room for its text, doubts, distance (--json has each).",
)


def _note(unit: Mapping[str, Any]) -> str:
    """Notes on a unit: why it is out, or that it has no room; and which values are estimates."""
    words = [str(unit["why_not"])] if unit["why_not"] else [] if unit["has_room"] else ["no room"]
    if (split := unit.get("split")) and split["pays"]:
        words.append(
            f"{split['prefiller']} computes the prompt: {_seconds(split['prefill_s'])}, transfer "
            f"{_seconds(split['transfer_s'])}, rest {_seconds(split['decode_s'])}"
        )
    if unit["guessed"]:
        words.append(f"guessed: {', '.join(unit['guessed'])}")
    return "; ".join(words)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


_BESIDE_VERDICT = {
    "drained": "drained",
    "draining": "draining",
    "restart_suspected": "restart suspected",
    "degraded": "slow",
    "odd_answers": "odd answers",
}


def verdict(unit: Mapping[str, Any]) -> str:
    """The verdict, and what else decides how many requests go there."""
    beside = [said for key, said in _BESIDE_VERDICT.items() if unit[key]]
    hold = [str(unit["hold"]["kind"])] if unit["hold"] else []
    links = [
        f"link {link['prefiller']} to {link['decoder']} avoided" for link in unit["links"] if link["avoided"]
    ]
    return ", ".join([str(unit["verdict"]), *hold, *beside, *links])


def poison_table(found: Mapping[str, Any]) -> str:
    """The prompts that are refused, one a line."""
    if not found["bans"]:
        return "no prompt is refused"
    head = ("FINGERPRINT", "MODEL", "ENDED", "AGE", "LEFT", "TOLD BY")
    rows = (
        (
            str(ban["fingerprint"]),
            str(ban["model"]),
            ", ".join(ban["units"]),
            duration(ban["age_s"]),
            duration(ban["left_s"]),
            str(ban["gate"] or "this gate"),
        )
        for ban in found["bans"]
    )
    return table((head, *rows))


def shown(text: str) -> str:
    """The text on one line; what could move a terminal's cursor is shown as '?'."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as columns, as wide as they need to be."""
    return "\n".join(columns(rows, [max(map(len, column)) for column in zip(*rows, strict=True)]))


def columns(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """A line for each row; a text that is wider than its column moves those after it."""
    return [
        "  ".join(shown(text).ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
