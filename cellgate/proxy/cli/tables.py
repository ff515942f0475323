"""Tables of text that commands print, from the configuration or from the admin port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellgate.proxy.logs.text import duration
from cellgate.router.nouns import Fleet

_TERMS = ("total", "queue", "prefill", "decode", "beside")
_OTHERS = ("kv", "seat", "line", "evict", "shared", "error", "doubt", "far", "latency")


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
        duration(unit["since_s"]),
        f"{unit['in_flight']} of {unit['max_in_flight']}",
        f"{load['running']}/{load['waiting']}" if (load := unit["load"]) else "-",
    ]


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
    head = (
        "UNIT",
        "CELL",
        "TOTAL",
        "QUEUE",
        "PREFILL",
        "DECODE",
        "BESIDE",
        "OTHER",
        "IN FLIGHT",
        "NOTE",
    )
    rows = (
        (
            str(unit["unit"]),
            str(unit["cell"]),
            *(_seconds(unit["cost"][f"{name}_s"]) for name in _TERMS),
            _seconds(sum(unit["cost"][f"{name}_s"] or 0.0 for name in _OTHERS)),
            f"{unit['in_flight']} of {unit['places']}",
            _note(unit),
        )
        for unit in found["units"]
    )
    wait = f" for about {_seconds(found['wait_s'])}" if found.get("wait_s") is not None else ""
    outcome = f"{found['decision']}{wait}: {found['reason']} (policy {found['policy']})"
    return "\n".join([shown(outcome), "", table([head, *rows]), *map(shown, found["notes"])])


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


def verdict(unit: Mapping[str, Any]) -> str:
    """The verdict, and what else decides how many requests go there."""
    words = ("drained", "restart_suspected", "degraded", "odd_answers")
    beside = [word.replace("_", " ") for word in words if unit[word]]
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
