"""What else an operator should know of a unit, in rotation or not: build, software, answers. Pure."""

from __future__ import annotations

from typing import Any

from cellgate.router.known_answers import AnswerRecord
from cellgate.router.unit_state import UnitState


def remarks(state: UnitState) -> list[str]:
    """One line each; none for an ordinary unit."""
    lines = []
    if state.other_builds:
        others = ", ".join(state.other_builds)
        lines.append(f"Its build, {state.build.key}, is another one than that of {others}.")
    if state.facts.odd:
        lines.append(f"Its software differs from that of its cell: it has {state.facts.odd}.")
    if state.has_odd_answers() and state.answers is not None:
        lines.append(f"Its last {state.answers.differing} answers to the known prompt differ.")
    return lines


def build_view(state: UnitState) -> dict[str, Any]:
    """Its build for JSON; empty where unknown."""
    fingerprint, version, _ = state.build
    return {"fingerprint": fingerprint, "version": version, "other_builds": list(state.other_builds)}


def answer_view(record: AnswerRecord | None, now: float) -> dict[str, Any] | None:
    """Its last answer to the known prompt for JSON; null: none yet."""
    if record is None:
        return None
    return {
        "question": record.question,
        "text": "".join(token.token for token in record.latest),
        "age_s": round(now - record.at, 3),
        "differing": record.differing,
    }
