"""The links of prefillers and decoders as the admin port shows them. Pure."""

from __future__ import annotations

from typing import Any

from cellgate.router.board import Board
from cellgate.router.links import TransferLink


def links_of(board: Board, unit: str, now: float) -> list[dict[str, Any]]:
    """The links of one unit, ready for JSON."""
    return [_view(*pair, link, now) for pair, link in sorted(board.pairs.links.items()) if unit in pair]


def avoided(board: Board, unit: str, now: float) -> list[str]:
    """The links of one unit that are avoided because transfers failed, a line each."""
    return [
        f"The link from {pair[0]} to {pair[1]} is avoided: transfers failed."
        for pair, link in sorted(board.pairs.links.items())
        if unit in pair and _is_avoided(link, now)
    ]


def _is_avoided(link: TransferLink, now: float) -> bool:
    """A link that was never used is closed as well while its first transfer is under way."""
    return link.failures > 0 and not link.is_open(now)


def _explained(prefiller: str, decoder: str, link: TransferLink, now: float) -> list[str]:
    """Why requests are, or are not, split between two units; each item is one line."""
    lines = [_headline(prefiller, decoder, link, now)]
    if link.last_failure:
        lines.append(f"Last failure: {link.last_failure} ({now - link.last_failure_at:.0f} s ago).")
    lines.append(f"{link.transferred} transfers arrived, {link.failed} failed.")
    if link.seen:
        lines.append(f"Its speed is {link.tokens_s:.0f} tokens of KV cache a second, as measured.")
    return lines


def _headline(prefiller: str, decoder: str, link: TransferLink, now: float) -> str:
    if link.is_open(now):
        return f"Requests may be split between {prefiller} and {decoder}."
    return (
        f"The pair of {prefiller} and {decoder} is avoided for {link.avoided_until - now:.1f} s more, after "
        f"{link.failures} failures in a row; then one request tries it."
    )


def _view(prefiller: str, decoder: str, link: TransferLink, now: float) -> dict[str, Any]:
    return {
        "prefiller": prefiller,
        "decoder": decoder,
        "open": link.is_open(now),
        "avoided": _is_avoided(link, now),
        "failures": link.failures,
        "last_failure": link.last_failure,
        "transferred": link.transferred,
        "failed": link.failed,
        "tokens_s": round(link.tokens_s) if link.seen else None,
        "why": _explained(prefiller, decoder, link, now),
    }
