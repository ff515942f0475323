"""Hashes of cached prompts that gates share: a JSON document for each gate. docs/redis.md describes it.

It has hashes of blocks of prompts (request/prompt.py), by unit, that the gate has just proven there. Pure
except for the Board. Advisory like everything in Redis: a document that is invalid, or of a gate that does
not report the unit, is counted and ignored. A wrong one makes units look cheaper for some prompts, until the
cached tokens that their engines report correct that.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.sharing.roster import Roster
from cellgate.router.board import Board
from cellgate.router.remote_prefixes import ProvenPrefixes, RemotePrefixes
from cellgate.router.unit_state import UnitState

VERSION = 1
HASHES_A_BEAT = 256
"""The most new hashes in one heartbeat: 3 kB."""
BEATS = 2
"""Each hash is published in this many heartbeats, because a reader misses one now and then."""
HASHES_MAX = 1024
"""The most hashes that are read of one document."""
DOCUMENT_MAX = 64 * 1024
GATES_MAX = 64
"""The most other gates whose documents are read."""
_BLOCK_BITS = 60

PrefixDocument = dict[str, list[int]]


def written(gate: str, told: Mapping[str, list[int]]) -> bytes:
    """The document."""
    units = {
        unit: b64encode(struct.pack(f"<{len(blocks)}Q", *blocks)).decode() for unit, blocks in told.items()
    }
    return orjson.dumps({"v": VERSION, "gate": gate, "units": units})


def read(document: Any) -> tuple[str, PrefixDocument] | None:
    """The gate and its hashes; None when the document is invalid."""
    try:
        found = (
            orjson.loads(document) if isinstance(document, bytes) and len(document) <= DOCUMENT_MAX else None
        )
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or found.get("v") != VERSION:
        return None
    gate, units = found.get("gate"), found.get("units")
    if not isinstance(gate, str) or not isinstance(units, dict):
        return None
    told, left = PrefixDocument(), HASHES_MAX
    for unit, text in units.items():
        if (blocks := _blocks(text)) is None:
            return None
        told[unit] = blocks[:left]
        left -= len(told[unit])
    return gate, told


class _Part(NamedTuple):
    """What was published of one unit in one heartbeat. `reborn`: as its case had it then."""

    unit_state: UnitState
    reborn: tuple[str, float] | None
    hashes: list[int]


class PrefixSharing:
    """The part of one gate. `roster` has the reports of other gates."""

    def __init__(self, board: Board, gate: str, roster: Roster, now: Callable[[], float]) -> None:
        self.remote = board.remote = RemotePrefixes()
        self._proven = board.proven = ProvenPrefixes()
        self._board = board
        self._gate = gate
        self._roster = roster
        self._now = now
        self._beats: list[list[_Part]] = []
        """What was published in the last heartbeats."""
        self._heard: dict[str, int] = {}
        """By gate: the hash of the document that was read last."""

    def document(self) -> tuple[bytes | None, int]:
        """What to publish in this heartbeat (None: nothing), and how many hashes are new."""
        news, states = self._proven.take(HASHES_A_BEAT, self._now()), self._board.units
        beat = [_Part(states[u], states[u].case.reborn, hashes) for u, hashes in news.items() if u in states]
        self._beats = [*self._beats[1 - BEATS :], beat]
        told = PrefixDocument()
        for part in (part for beat in self._beats for part in beat):
            # The cache of an earlier incarnation is gone.
            if part.unit_state.case.reborn == part.reborn and not part.unit_state.retired:
                told.setdefault(part.unit_state.unit.name, []).extend(part.hashes)
        return (written(self._gate, told) if told else None), sum(len(part.hashes) for part in beat)

    def heard(self, gate: str, document: Any) -> int | None:
        """Apply the document of another gate; returns the number of hashes. None: it is ignored."""
        mark = hash(document) if isinstance(document, bytes) else 0
        if mark and self._heard.get(gate) == mark:
            return 0
        found = read(document)
        if found is None or found[0] != gate or gate == self._gate:
            return None
        if len(self._heard) >= GATES_MAX:
            self._heard.clear()
        self._heard[gate] = mark
        taken = 0
        for unit, blocks in found[1].items():
            state = self._board.units.get(unit)
            if state is not None and self._is_of_now(state, gate):
                self.remote.take(unit, blocks, self._now())
                taken += len(blocks)
        return taken

    def _is_of_now(self, state: UnitState, gate: str) -> bool:
        """Whether that gate reports the unit with the same epoch."""
        report = self._roster.said(state.unit.name, gate)
        if report is None:
            return False
        own, theirs = {epoch for _, epoch in state.case.epochs}, set(filter(None, report.epoch.split(",")))
        return not own or not theirs or not own.isdisjoint(theirs)


def _blocks(text: Any) -> list[int] | None:
    try:
        data = a2b_base64(text, strict_mode=True) if isinstance(text, str) else b"?"
        blocks = list(struct.unpack(f"<{len(data) // 8}Q", data))
    except (Base64Error, ValueError, struct.error):
        return None
    return blocks if max(blocks, default=0) >> _BLOCK_BITS == 0 else None
