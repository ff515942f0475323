"""A file of 100,000 keys is read again, while streams go on: no turn of the loop takes long."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
from pathlib import Path

import pytest

from cellgate.proxy.admission.keys import KeyChecker
from cellgate.proxy.admission.usage import Accounting
from cellgate.proxy.config.settings import KeySettings
from cellgate.proxy.observe.events import EventLog

KEYS, TENANTS = 100_000, 5_000
TURN_MAX_S = 0.02
"""Of CPU time, which another program on the machine does not change."""
TAKEN_S = 60.0


def write(path: Path, version: int) -> None:
    digests = (hashlib.sha256(b"%d %d" % (version, n)).hexdigest() for n in range(KEYS))
    lines = (
        f'{{"key":"k{n}","sha256":"{digest}","tenant":"t{n % TENANTS}",'
        f'"limits":{{"requests_per_minute":{100 + version}}}}}\n'
        for n, digest in enumerate(digests)
    )
    fresh = path.with_suffix(".next")
    fresh.write_text("".join(lines))
    fresh.rename(path)


@pytest.mark.alone
def test_a_reload_of_a_hundred_thousand_keys_stops_no_stream_for_20_ms(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    async def reload() -> float:
        events = EventLog(time.time, 2, lambda *_: None)
        accounting = Accounting(KeySettings(str(path)), None, events, frozenset)
        accounting.key_check = KeyChecker(accounting.ledger, time.time, ends_streams=True)
        accounting.begin()
        for n in range(KEYS):
            accounting.ledger._plan(f"k{n}", f"t{n % TENANTS}")
        await asyncio.to_thread(write, path, 1)
        gc.collect()
        gc.freeze()
        worst_s, begun = 0.0, time.monotonic()
        while time.monotonic() - begun < TAKEN_S and not (events.last() and not accounting.ledger._stale):
            before = time.thread_time()
            await asyncio.sleep(0.002)
            accounting.tick(time.time())
            worst_s = max(worst_s, time.thread_time() - before)
        assert [event["kind"] for event in events.last()] == ["keys_taken"]
        await accounting.close()
        gc.unfreeze()
        return worst_s

    write(path, 0)
    assert asyncio.run(reload()) <= TURN_MAX_S
