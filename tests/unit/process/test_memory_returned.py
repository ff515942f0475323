"""What a process of the gate has used once, and needs no more, goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cellgate.proxy.process.memory import LARGE_BLOCK_BYTES, SmallBlocks

_WAVE = """
import sys
def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

if sys.argv[1] == "yes":
    from cellgate.proxy.process.memory import return_large_blocks
    return_large_blocks()
# One block that is freed teaches glibc to keep all of its size.
bytes(20 << 20)
before = resident_mb()
wave, kept = [], []
for _ in range(13):
    wave.append(b"a" * int(sys.argv[2]))
    kept.append(bytearray(3000))
wave.clear()
print(resident_mb() - before)
"""


@pytest.mark.parametrize("returns", ["yes", "no"])
def test_large_blocks_are_returned_though_small_ones_between_them_are_kept(returns: str) -> None:
    command = [sys.executable, "-c", _WAVE, returns, str(LARGE_BLOCK_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    kept_mb = float(done.stdout)
    # Without it a wave of 52 MB stays: what the other half of this test shows.
    assert kept_mb < 5.0 if returns == "yes" else kept_mb > 25.0, kept_mb


_CROWD = """
import sys
from cellgate.proxy.process.memory import CROWD, SmallBlocks, return_large_blocks

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

return_large_blocks()
clients = 4 * CROWD
small = SmallBlocks(lambda: clients)
small.tick(0.0)
before = resident_mb()
wave, kept = [], []
for _ in range(1000):
    wave.append(b"a" * 30_000)
    kept.append(bytearray(3000))
wave.clear()
clients = int(sys.argv[1])
for _ in range(2):
    small.tick(0.0)
print(resident_mb() - before)
"""


@pytest.mark.parametrize("left", [0, 200])
def test_small_blocks_are_returned_once_most_of_a_crowd_has_left(left: int) -> None:
    command = [sys.executable, "-c", _CROWD, str(left)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    kept_mb = float(done.stdout)
    assert kept_mb < 10.0 if left == 0 else kept_mb > 25.0, kept_mb


LEAVING = {
    "all at once": ([100, 0, 0, 0], 1),
    "few": ([60, 0, 0, 0], 0),
    "a part": ([100, 60, 60, 60], 0),
    "slowly": ([100, *range(96, 0, -4)], 1),
    "in a rush that goes on": ([1000, 400, 200, 100, 50, 50], 1),
    "twice": ([100, 0, 0, 100, 0, 0], 2),
}


@pytest.mark.parametrize(("clients", "times"), LEAVING.values(), ids=LEAVING)
def test_blocks_are_looked_through_once_for_each_crowd_that_leaves(
    clients: list[int], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[None] = []
    monkeypatch.setattr("cellgate.proxy.process.memory.return_small_blocks", lambda: returned.append(None))
    seen = iter(clients)
    small = SmallBlocks(lambda: next(seen))
    for _ in clients:
        small.tick(0.0)
    assert len(returned) == times
