"""The stage of the suite: simulated units, evil units, a gate before them, and the neighbour on the same
units.
"""

from __future__ import annotations

import asyncio
import json
import time
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from loadtests.abuse.client import ask
from loadtests.abuse.evil import MODEL as EVIL_MODEL
from loadtests.abuse.evil import EvilUnits
from loadtests.abuse.misdeeds import FORBIDDEN, MISDEEDS
from loadtests.abuse.neighbour import ADDRESS, Neighbour
from loadtests.abuse.nouns import KEYS, USAGE_LOG, Place, Surroundings
from loadtests.kit.gate import GateProcess
from loadtests.kit.processes import free_port, put_first, tail
from loadtests.simunit.process import SimUnit
from loadtests.wire.messages import get, post, whole
from loadtests.wire.scripted import Request, listen, port_of

SIM = "sim"
"""The model that abusers ask for, and the neighbour."""
UNITS = ("sim", "sim-2")
SLOTS = 64
"""`max_in_flight` of each unit."""
TIMING = {
    "step_ms": 1,
    "per_sequence_ms": 0.001,
    "prefill_tokens_per_s": 1e9,
    "max_num_batched_tokens": 1_000_000,
    "max_num_seqs": 1024,
    "followers": 0,
}
OWN_ADDRESS = "127.0.0.1"
"""From where abusers ask."""
EVIL = ("evil-1", "evil-2")
_LARGE_BODY = 1_200_000
_WARM_UPS = 200
_UP_TIMEOUT_S = 45.0


class Stage:
    """All of it, inside a `with`. The gate is restarted by `fresh`; the units stay."""

    def __init__(self) -> None:
        self.evil = EvilUnits(MISDEEDS)
        self._kv_port = free_port()
        self._folder = TemporaryDirectory()
        self._keys = Path(self._folder.name) / "keys.jsonl"
        self._guardrail: asyncio.Server | None = None
        self._units: list[SimUnit] = []
        self._gate: GateProcess | None = None
        self._surroundings: Surroundings | None = None
        self._neighbour: Neighbour | None = None

    async def __aenter__(self) -> Self:
        try:
            self._units += await asyncio.to_thread(SimUnit.start_all, UNITS, model=SIM, **TIMING)
            for unit in self._units:
                put_first(unit.pid)
            await self.evil.open(EVIL)
            self._guardrail = await listen(_judged)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def place(self) -> Place:
        """Where abuses are done."""
        assert self._gate is not None, "start a gate first"
        return Place(self._gate, self.evil, self._kv_port, tuple(self._units), self._keys)

    @property
    def neighbour(self) -> Neighbour:
        """Who asks meanwhile."""
        assert self._neighbour is not None, "start a gate first"
        return self._neighbour

    async def ready(self, surroundings: Surroundings) -> None:
        """Have a gate in these surroundings that is well: all its units up. Raises RuntimeError if not."""
        self.evil.pages.clear()
        self.evil.floods = False
        if self._surroundings != surroundings or not await self._is_well():
            await self.fresh(surroundings)

    async def fresh(self, surroundings: Surroundings) -> None:
        """Start a new gate, and have it serve what it has never served before."""
        await self.leave()
        settings: dict[str, object] = {}
        if (size := surroundings.bodies_bytes) is not None:
            settings["limits"] = {"bodies_bytes": size}
        if surroundings.uses == "realtime":
            settings["realtime"] = True
        elif surroundings.uses == "guardrail":
            assert self._guardrail is not None
            url = f"http://127.0.0.1:{port_of(self._guardrail)}/check"
            settings["guardrail"] = {"url": url, "answer": "windows", "fail": "closed"}
        elif surroundings.uses == "keys":
            lines = (json.dumps({"key": who, "sha256": sha256(key).hexdigest()}) for who, key in KEYS.items())
            self._keys.write_text("\n".join(lines))
            settings |= {"keys": {"file": str(self._keys)}, "usage_log": str(self._keys.with_name(USAGE_LOG))}
        gate = GateProcess(
            [*self._units, *self.evil.units],
            max_in_flight=SLOTS,
            settings=settings,
            access_log="json",
            files=surroundings.files,
            unread_log=surroundings.unread_log,
            roles=dict(zip(EVIL, ("prefill", "decode"), strict=True))
            if surroundings.uses == "roles"
            else None,
            cell=lambda name: "evil" if name in EVIL else "drill",
            more={name: self._more(name, surroundings.uses) for name in (*UNITS, *EVIL)},
        )
        await asyncio.to_thread(gate.__enter__)
        self._gate, self._surroundings = gate, surroundings
        key = KEYS["neighbour"].decode() if surroundings.uses == "keys" else ""
        self._neighbour = await Neighbour.start(
            gate.port,
            EVIL_MODEL if surroundings.beside_evil else SIM,
            key,
            OWN_ADDRESS if surroundings.same_address else ADDRESS,
        )
        put_first(gate.pid)
        put_first(self._neighbour.pid)
        await self._warm_up(gate)

    def _more(self, unit: str, uses: str) -> dict[str, object]:
        """What else the gate is told of a unit: an evil agent watches it, or whoever likes publishes its KV
        events.
        """
        if uses == "agents" and unit in UNITS:
            agent = self.evil.units[UNITS.index(unit)].url.removeprefix("http://")
            return {"nodes": [{"name": unit, "role": "leader", "agent": agent}]}
        if uses == "kv_events" and unit == UNITS[0]:
            return {"kv_events": {"from": "vllm", "endpoint": f"tcp://127.0.0.1:{self._kv_port}"}}
        return {}

    async def leave(self) -> None:
        """End the gate and its neighbour."""
        if self._neighbour is not None:
            await self._neighbour.stop()
        if self._gate is not None:
            await asyncio.to_thread(self._gate.__exit__, None, None, None)
        self._gate = self._neighbour = self._surroundings = None

    def log_tail(self) -> str:
        """The end of what the gate printed."""
        return tail(self._gate.log) if self._gate is not None else ""

    async def _is_well(self) -> bool:
        try:
            await asyncio.wait_for(asyncio.to_thread(self.place.gate.wait_up), _UP_TIMEOUT_S)
        except (OSError, RuntimeError, AssertionError):
            return False
        return True

    async def _warm_up(self, gate: GateProcess) -> None:
        """Memory is compared with that of a gate that has served before, large bodies too."""
        large = b'{"model":"none","messages":[{"role":"user","content":"%b"}]}' % (b"a" * _LARGE_BODY)
        give_up_at = time.monotonic() + _UP_TIMEOUT_S
        for _ in range(3):
            await ask(gate.port, post(large))
        for _ in range(_WARM_UPS):
            await ask(gate.port, get("/v1/models"))
            if time.monotonic() > give_up_at:
                break
        await asyncio.sleep(0.5)

    async def _close(self) -> None:
        await self.leave()
        self._folder.cleanup()
        self.evil.close()
        if self._guardrail is not None:
            self._guardrail.close()
        for unit in self._units:
            await asyncio.to_thread(unit.stop)


async def _judged(asked: Request) -> None:
    """The guardrail: a word is forbidden."""
    action = b"deny" if FORBIDDEN in asked.body else b"allow"
    await asked.send(whole(b'{"action":"%b","reason":"a word"}' % action))
